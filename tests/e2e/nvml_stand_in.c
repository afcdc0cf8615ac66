#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef unsigned long long ull;
typedef struct { unsigned pid; ull used; unsigned gpu_instance, compute_instance; } process;
static int fails(const char *function, long handle) {
    char named[80]; long gpu; int code;
    const char *order = getenv("NVML_STAND_IN");
    if (!order || sscanf(order, "%79s %ld %d", named, &gpu, &code) != 3) return 0;
    if (strcmp(named, function) || (gpu >= 0 && gpu != handle - 1)) return 0;
    if (code == -1) sleep(60);
    if (code == -2) { volatile int *nowhere = 0; *nowhere = 1; }
    return code;
}
#define ANSWER(handle, ...) int failed = fails(__func__, (long)(handle)); if (failed) return failed; __VA_ARGS__; return 0
int nvmlInitWithFlags(unsigned flags) { ANSWER(0, (void)flags); }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned n) { ANSWER(0, snprintf(text, n, "580.95.05")); }
int nvmlDeviceGetCount_v2(unsigned *count) { ANSWER(0, *count = 2); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { ANSWER(index + 1, *handle = (void *)(index + 1L)); }
int nvmlDeviceGetName(void *h, char *text, unsigned n) { ANSWER(h, snprintf(text, n, "Stand-in %ld", (long)h - 1)); }
int nvmlDeviceGetUUID(void *h, char *text, unsigned n) { ANSWER(h, snprintf(text, n, "GPU-%ld", (long)h - 1)); }
int nvmlDeviceGetMemoryInfo(void *h, ull *memory) { ANSWER(h, memory[0] = 8ULL << 30; memory[1] = 7ULL << 30); }
#ifndef OLD
int nvmlSystemGetCudaDriverVersion_v2(int *version) { ANSWER(0, *version = 13010); }
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) { ANSWER(h, *major = 9; *minor = 0); }
int nvmlDeviceGetComputeMode(void *h, unsigned *mode) { ANSWER(h, *mode = 3); }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *next) { ANSWER(h, *now = (long)h == 2; *next = 0); }
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *count) { ANSWER(h, *count = 7); }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned index, void **part) {
    if (index != 3) return 6;
    ANSWER(h, *part = (void *)(index + 101L));
}
static int processes(unsigned *count, process *list, int drawing) {
    if (*count < 2) { *count = 2; return 7; }
    list[0] = (process){1, drawing ? 1ULL << 30 : ~0ULL, 0, 0};
    list[1] = (process){getppid(), 5, 0, 0};
    *count = 2;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, process *list) {
    int failed = fails(__func__, (long)h); return failed ? failed : processes(n, list, 0);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *n, process *list) {
    int failed = fails(__func__, (long)h); return failed ? failed : processes(n, list, 1);
}
#endif
