/* One GPU: what it is and how it fares. */
#include "device.h"
#include "state.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static const unsigned long long MIB = 1ULL << 20;

/* A function that gives one text, one number of its unit, or one switch of a GPU, straight from the file. */
#define TEXT(function, key)                                                        \
    nvmlReturn_t function(nvmlDevice_t device, char *out, unsigned int length) {   \
        char text[LONGEST_FACT];                                                   \
        int gpu;                                                                   \
        nvmlReturn_t answer = ask_device(device, &gpu);                            \
        if (answer != NVML_SUCCESS) return answer;                                 \
        return fact(gpu, key, text) ? give_text(text, out, length) : NVML_ERROR_NOT_SUPPORTED; \
    }
#define NUMBER(function, type, key, factor, otherwise)                             \
    nvmlReturn_t function(nvmlDevice_t device, type *out) {                        \
        int gpu;                                                                   \
        nvmlReturn_t answer = ask_device(device, &gpu);                            \
        if (answer == NVML_SUCCESS) *out = (type)(fact_number(gpu, key, otherwise) * (factor)); \
        return answer;                                                             \
    }

TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetSerial, "serial")
NUMBER(nvmlDeviceGetArchitecture, unsigned int, "architecture", 1, 0xffffffff)
NUMBER(nvmlDeviceGetPowerUsage, unsigned int, "power_w", 1000, 0)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned int, "power_limit_w", 1000, 0)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned int, "power_limit_w", 1000, 0)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "throttle", 1, 0)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "throttle", 1, 0)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned int, "retirement_pending", 1, 0)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, "pcie_width", 1, 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, "pcie_max_width", 1, 16)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, "pcie_max_generation", 1, 4)
NUMBER(nvmlDeviceGetPersistenceMode, unsigned int, "persistence", 1, 1)
NUMBER(nvmlDeviceGetPerformanceState, unsigned int, "performance_state", 1, 0)
NUMBER(nvmlDeviceGetComputeMode, unsigned int, "compute_mode", 1, 0)
NUMBER(nvmlDeviceGetNumaNodeId, int, "numa", 1, 0)

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *out) {
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer == NVML_SUCCESS) *out = (unsigned int)gpu;
    return answer;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *out) { return nvmlDeviceGetIndex(device, out); }

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    char text[LONGEST_FACT];
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer != NVML_SUCCESS) return answer;
    if (!fact(gpu, "capability", text)) return NVML_ERROR_NOT_SUPPORTED;
    return sscanf(text, "%d.%d", major, minor) == 2 ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *out) {
    char text[LONGEST_FACT];
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer != NVML_SUCCESS) return answer;
    memset(out, 0, sizeof *out);
    if (!fact(gpu, "pci", text) || sscanf(text, "%x:%x:%x", &out->domain, &out->bus, &out->device) != 3)
        return NVML_ERROR_NOT_SUPPORTED;
    out->pciDeviceId = (unsigned int)fact_number(gpu, "pci_id", 0);
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff,
             out->device & 0xff);
    snprintf(out->busId, sizeof out->busId, "%08X:%02X:%02X.0", out->domain, out->bus, out->device);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *out) {
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer != NVML_SUCCESS) return answer;
    out->gpu = (unsigned int)fact_number(gpu, "utilisation", 0);
    out->memory = (unsigned int)fact_number(gpu, "memory_utilisation", out->gpu / 2);
    return NVML_SUCCESS;
}

/* An idle GPU lowers the generation of its link to 1. */
nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned int *out) {
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer != NVML_SUCCESS) return answer;
    bool is_busy = fact_number(gpu, "utilisation", 0) > 0;
    *out = is_busy ? (unsigned int)fact_number(gpu, "pcie_generation", fact_number(gpu, "pcie_max_generation", 4)) : 1;
    return NVML_SUCCESS;
}

/* 0 = NVML_CLOCK_GRAPHICS, 1 = …_SM: one clock. The others are not served. */
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned int kind, unsigned int *out) {
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer != NVML_SUCCESS) return answer;
    if (kind > 1) return NVML_ERROR_NOT_SUPPORTED;
    *out = (unsigned int)fact_number(gpu, "sm_mhz", 1400);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *out) {
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer != NVML_SUCCESS) return answer;
    if (sensor != 0) return NVML_ERROR_INVALID_ARGUMENT;
    *out = (unsigned int)fact_number(gpu, "temperature_c", 30);
    return NVML_SUCCESS;
}

/* 0 = NVML_TEMPERATURE_THRESHOLD_SHUTDOWN, 1 = …_SLOWDOWN */
nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned int kind, unsigned int *out) {
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer == NVML_SUCCESS) *out = kind == 0 ? 90 : 87;
    return answer;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer == NVML_SUCCESS) *current = *pending = (unsigned int)fact_number(gpu, "ecc", 1);
    return answer;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned int kind, unsigned int counter,
                                         unsigned long long *out) {
    (void)counter; /* volatile and aggregate are the same here: the driver has just been loaded */
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer != NVML_SUCCESS) return answer;
    *out = fact_number(gpu, kind == NVML_MEMORY_ERROR_UNCORRECTED ? "ecc_uncorrected" : "ecc_corrected", 0);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, unsigned int kind, unsigned int counter,
                                             unsigned int location, unsigned long long *out) {
    nvmlReturn_t answer = nvmlDeviceGetTotalEccErrors(device, kind, counter, out);
    if (answer == NVML_SUCCESS && location != 2) *out = 0; /* all of them are in device memory */
    return answer;
}

static bool remaps_rows(int gpu) { return fact_number(gpu, "architecture", 0) >= NVML_ARCH_AMPERE; }

nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, unsigned int cause, unsigned int *count,
                                       unsigned long long *addresses) {
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer != NVML_SUCCESS) return answer;
    if (remaps_rows(gpu)) return NVML_ERROR_NOT_SUPPORTED;
    unsigned int room = *count;
    *count = cause == 1 ? (unsigned int)fact_number(gpu, "retired_pages", 0) : 0; /* 1 = double bit errors */
    if (*count > room || (*count > 0 && addresses == NULL)) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int page = 0; page < *count; page++) addresses[page] = page << 12;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                       unsigned int *pending, unsigned int *failure) {
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer != NVML_SUCCESS) return answer;
    if (!remaps_rows(gpu)) return NVML_ERROR_NOT_SUPPORTED;
    *corrected = 0;
    *uncorrected = (unsigned int)fact_number(gpu, "remapped_rows", 0);
    *pending = (unsigned int)fact_number(gpu, "retirement_pending", 0);
    *failure = (unsigned int)fact_number(gpu, "remap_failed", 0);
    return NVML_SUCCESS;
}

/* A process that has ended is not on the list, whatever the file says: the driver frees what it held. (The real one
   does so when its forked children have ended, too.) */
static bool process(int gpu, const char *key, int place, nvmlProcessInfo_t *out) {
    char word[LONGEST_FACT], path[32];
    struct stat entry;
    unsigned long long mib;
    for (int number = 0, alive = 0; fact_word(gpu, key, number, word); number++) {
        memset(out, 0, sizeof *out);
        out->gpuInstanceId = out->computeInstanceId = 0xffffffff; /* no MIG */
        mib = 0;
        if (sscanf(word, "%u:%llu", &out->pid, &mib) < 1) continue;
        out->usedGpuMemory = mib * MIB;
        snprintf(path, sizeof path, "/proc/%u", out->pid);
        if (stat(path, &entry) == 0 && alive++ == place) return true;
    }
    return false;
}

static nvmlReturn_t list_processes(nvmlDevice_t device, const char *key, unsigned int *count, void *list,
                                   size_t size) {
    int gpu;
    nvmlProcessInfo_t info;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer != NVML_SUCCESS) return answer;
    unsigned int room = *count;
    for (*count = 0; process(gpu, key, (int)*count, &info); (*count)++)
        if (list != NULL && *count < room) memcpy((char *)list + *count * size, &info, size);
    return *count > room || (*count > 0 && list == NULL) ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *list) {
    return list_processes(device, "processes", count, list, sizeof *list);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *list) {
    return list_processes(device, "processes", count, list, sizeof *list);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *list) {
    return list_processes(device, "processes", count, list, sizeof *list);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *list) {
    return list_processes(device, "graphics", count, list, sizeof *list);
}

/* Memory in use: what the file says beyond the processes, and the processes' own. */
static unsigned long long used_bytes(int gpu) {
    unsigned long long used = fact_number(gpu, "used_mib", 0) * MIB;
    nvmlProcessInfo_t info;
    for (int place = 0; process(gpu, "processes", place, &info); place++) used += info.usedGpuMemory;
    return used;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *out) {
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer != NVML_SUCCESS) return answer;
    out->total = fact_number(gpu, "memory_mib", 0) * MIB;
    out->used = used_bytes(gpu) < out->total ? used_bytes(gpu) : out->total;
    out->free = out->total - out->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *out) {
    nvmlMemory_t plain;
    nvmlReturn_t answer = nvmlDeviceGetMemoryInfo(device, &plain);
    if (answer != NVML_SUCCESS) return answer;
    out->total = plain.total;
    out->free = plain.free;
    out->used = plain.used;
    out->reserved = 0;
    return NVML_SUCCESS;
}
