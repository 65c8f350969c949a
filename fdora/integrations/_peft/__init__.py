"""The parts of :mod:`fdora.integrations.peft`: dora (shared), linear (the whole layer), variants (each kind), report."""
