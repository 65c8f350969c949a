"""The makers' published rates of GPUs: dense bfloat16 products with float32 sums, and memory. Costs and choices of tiles start
here."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """Published rates per second, and what decides which kernels run."""

    name: str
    flops: float  # dense bfloat16
    bytes: float
    tf32: float = float("inf")
    fp32: float = float("inf")
    capability: int = 90
    num_sms: int = 132
    gib: float = 0.0  # of memory, as torch sees it
    driver: str | None = None  # what the driver calls it

    def seconds(self, flops16: float, flops32: float, bytes: float, full_fp32: bool = False) -> float:
        """Least time of one operation: its products or its bytes, whichever takes longer."""
        return max(flops16 / self.flops + flops32 / (self.fp32 if full_fp32 else self.tf32), bytes / self.bytes)


# Those by whose rates a cost may be asked for. A driver's name is of one model: others of its chip have other rates.
GPUS = {
    "h200": Gpu("H200 SXM", 989e12, 4.80e12, 494e12, 67e12, 90, 132, 139.8, "NVIDIA H200"),
    "h100": Gpu("H100 SXM", 989e12, 3.35e12, 494e12, 67e12, 90, 132, 79.1, "NVIDIA H100 80GB HBM3"),
    "a100": Gpu("A100 SXM 80 GB", 312e12, 2.04e12, 156e12, 19.5e12, 80, 108, 79.2, "NVIDIA A100-SXM4-80GB"),
    "l40s": Gpu("L40S", 362e12, 0.864e12, 183e12, 91.6e12, 89, 142, 44.4, "NVIDIA L40S"),
    "b200": Gpu("B200", 2250e12, 8.0e12, 1125e12, 75e12, 100, 148, 178.3, "NVIDIA B200"),
    "4090": Gpu("GeForce RTX 4090", 165e12, 1.008e12, 82.6e12, 82.6e12, 89, 128, 23.5, "NVIDIA GeForce RTX 4090"),
    "b300": Gpu("B300", 2500e12, 8.0e12, 1250e12, 77e12, 103, 148, 268.0),
    "5090": Gpu("GeForce RTX 5090", 210e12, 1.79e12, 105e12, 105e12, 120, 170, 31.4, "NVIDIA GeForce RTX 5090"),
    "rtx6000pro": Gpu("RTX PRO 6000 Blackwell", 504e12, 1.79e12, 252e12, 126e12, 120, 188, 95.0),
    "mi300x": Gpu("MI300X", 1307e12, 5.3e12, 654e12, 163e12, 0, 304, 192.0, "AMD Instinct MI300X"),
}


def gpu_of(device_name: str) -> Gpu | None:
    """The rates of this very GPU, if they are known."""
    return next((gpu for gpu in GPUS.values() if gpu.driver == device_name), None)


# capability -> the GPU whose rates count for its like; 0: AMD. The others have no rates of float32 products here.
BY_CAPABILITY = {
    gpu.capability: gpu
    for gpu in (
        *(GPUS[name] for name in ("a100", "4090", "h200", "b200", "b300", "5090", "mi300x")),
        Gpu("GeForce RTX 3090", 71e12, 0.94e12, capability=86, num_sms=82),
    )
}
