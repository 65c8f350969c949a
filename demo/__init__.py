"""The demo: ``python -m demo.run`` fine-tunes a real model with fdora and with PEFT, side by side."""
