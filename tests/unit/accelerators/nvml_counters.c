/* Stand-in for libnvidia-ml.so.1 on machines without a driver: two GPUs, the second one lost, and a
 * third that reports its name alone. Signatures are those of nvml.h. */
#include <string.h>

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef void *Device;

enum { SUCCESS = 0, UNSUPPORTED = 3, LOST = 15 };

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device *device) {
    *device = (Device)(0x700000000000UL + index);  /* needs all bits of a pointer */
    return index == 1 ? LOST : SUCCESS;
}
static int is_first(Device device) { return device == (Device)0x700000000000UL; }
int nvmlDeviceGetMemoryInfo(Device device, Memory *memory) {
    *memory = (Memory){85899345920ULL, 1ULL, 1073741824ULL};
    return is_first(device) ? SUCCESS : UNSUPPORTED;
}
int nvmlDeviceGetUtilizationRates(Device device, Utilization *rates) {
    *rates = (Utilization){55, 7};
    return is_first(device) ? SUCCESS : UNSUPPORTED;
}
int nvmlDeviceGetPowerUsage(Device device, unsigned int *milliwatts) {
    *milliwatts = 700500;
    return is_first(device) ? SUCCESS : UNSUPPORTED;
}
int nvmlDeviceGetTemperature(Device device, int sensor, unsigned int *celsius) {
    *celsius = 61;
    return is_first(device) && sensor == 0 ? SUCCESS : UNSUPPORTED;
}
int nvmlDeviceGetUUID(Device device, char *text, unsigned int length) {
    strncpy(text, "GPU-8a", length);
    return is_first(device) ? SUCCESS : UNSUPPORTED;
}
int nvmlDeviceGetName(Device device, char *text, unsigned int length) {
    strncpy(text, "NVIDIA H100", length);
    return SUCCESS;
}
