"""Frameworks that can run DoRA through fdora, one file each. Nothing here is imported by ``fdora`` itself."""
