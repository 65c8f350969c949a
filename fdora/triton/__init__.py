"""Home of the Triton kernels, with the file names and signatures of :mod:`fdora.eager`. This release has none yet."""
