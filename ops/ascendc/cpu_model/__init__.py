"""A CPU model of the Ascend C API: compiles unmodified kernels with g++ and checks the rules of the hardware."""
