"""Many adapters trained on one base: what goes when (``schedule``), what it takes (``plan``), what runs it (``loop``).

They use the library's public functions at most, and nothing in the library needs them.
"""
