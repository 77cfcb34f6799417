// Fake NVML: GPUs whose identities are letters of one case are linked by NVLink; one whose identity
// begins with a digit is not in this machine.
#include <ctype.h>
#include <string.h>

static char known[2][64];
static int found;

int nvmlInit_v2(void) { return 0; }

int nvmlDeviceGetHandleByUUID(const char* name, void** handle) {
  if (strncmp(name, "GPU-3", 5) == 0) return 6;  // NVML_ERROR_NOT_FOUND
  *handle = strcpy(known[found++ % 2], name);
  return 0;
}

int nvmlDeviceGetP2PStatus(void* one, void* other, int which, int* status) {
  if (which != 2) return 2;  // NVML_ERROR_INVALID_ARGUMENT
  *status = ((char*)one)[4] == ((char*)other)[4] ? 0 : 4;
  return 0;
}
