// Fake NVML: GPUs whose identities are letters of one case are linked by NVLink; one whose identity
// begins with a digit is not in this machine.
#include <ctype.h>
#include <string.h>

static char device_names[2][64];
static int handle_count;

int nvmlInit_v2(void) { return 0; }

int nvmlDeviceGetHandleByUUID(const char* name, void** handle) {
  if (strncmp(name, "GPU-3", 5) == 0) return 6;  // NVML_ERROR_NOT_FOUND
  *handle = strcpy(device_names[handle_count++ % 2], name);
  return 0;
}

int nvmlDeviceGetP2PStatus(void* first_gpu, void* second_gpu, int capability, int* status) {
  if (capability != 2) return 2;  // NVML_ERROR_INVALID_ARGUMENT
  *status = ((char*)first_gpu)[4] == ((char*)second_gpu)[4] ? 0 : 4;
  return 0;
}
