"""Device operators that do not ship inside the package: Ascend C and Triton sources with their build code."""
