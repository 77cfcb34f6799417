// The host code of the NVLink engine as one translation unit.
#include "../cuda/driver.cpp"
#include "cuda_device.cpp"
#include "engine.cpp"
#include "nvml.cpp"
#include "kernel_plan.cpp"
#include "python.cpp"
