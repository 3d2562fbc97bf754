"""The 12-bit lossless code: its layout, its codec and a file's metadata. It knows no files and no kernels."""
