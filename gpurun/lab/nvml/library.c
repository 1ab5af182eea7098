/* The library and the driver: init, versions, finding GPUs. */
#include "device.h"
#include "state.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

static int users;

nvmlDevice_t device_of(int gpu) { return (nvmlDevice_t)(intptr_t)(gpu + 1); }

int index_of(nvmlDevice_t device) { return (int)(intptr_t)device - 1; }

nvmlReturn_t ask_driver(void) {
    if (users == 0) return NVML_ERROR_UNINITIALIZED;
    if (!state_exists()) return NVML_ERROR_DRIVER_NOT_LOADED;
    unsigned long long hang_s = fact_number(DRIVER, "hang_s", 0);
    while (hang_s > 0) hang_s = sleep((unsigned int)hang_s);
    return (nvmlReturn_t)fact_number(DRIVER, "error", NVML_SUCCESS);
}

nvmlReturn_t ask_device(nvmlDevice_t device, int *gpu) {
    nvmlReturn_t answer = ask_driver();
    if (answer != NVML_SUCCESS) return answer;
    *gpu = index_of(device);
    if (!state_has(*gpu)) return NVML_ERROR_INVALID_ARGUMENT;
    return (nvmlReturn_t)fact_number(*gpu, "error", NVML_SUCCESS);
}

nvmlReturn_t give_text(const char *text, char *out, unsigned int length) {
    if (out == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) + 1 > length) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    users++;
    nvmlReturn_t answer = ask_driver();
    if (answer != NVML_SUCCESS) users--;
    return answer;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlInit(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) {
    if (users == 0) return NVML_ERROR_UNINITIALIZED;
    users--;
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result) {
    switch ((int)result) {
    case 0: return "Success";
    case 1: return "Uninitialized";
    case 2: return "Invalid Argument";
    case 3: return "Not Supported";
    case 6: return "Not Found";
    case 7: return "Insufficient Size";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
    default: return "Unknown Error";
    }
}

static nvmlReturn_t driver_text(const char *key, char *out, unsigned int length) {
    char text[LONGEST_FACT] = "";
    nvmlReturn_t answer = ask_driver();
    if (answer != NVML_SUCCESS) return answer;
    return fact(DRIVER, key, text) ? give_text(text, out, length) : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned int length) { return driver_text("version", out, length); }

nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned int length) {
    char driver[LONGEST_FACT], text[LONGEST_FACT + 24];
    nvmlReturn_t answer = driver_text("version", driver, sizeof driver);
    if (answer != NVML_SUCCESS) return answer;
    snprintf(text, sizeof text, "%llu.%s", fact_number(DRIVER, "cuda", 12000) / 1000, driver);
    return give_text(text, out, length);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    nvmlReturn_t answer = ask_driver();
    if (answer == NVML_SUCCESS) *version = (int)fact_number(DRIVER, "cuda", 12000);
    return answer;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *out, unsigned int length) {
    char path[32], text[LONGEST_FACT];
    snprintf(path, sizeof path, "/proc/%u/exe", pid);
    ssize_t size = readlink(path, text, sizeof text - 1);
    if (size < 0) return NVML_ERROR_NOT_FOUND;
    text[size] = '\0';
    return give_text(text, out, length);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    nvmlReturn_t answer = ask_driver();
    if (answer == NVML_SUCCESS) *count = (unsigned int)state_gpus();
    return answer;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) { return nvmlDeviceGetCount_v2(count); }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    int gpu;
    nvmlReturn_t answer = index < MOST_GPUS ? ask_device(device_of((int)index), &gpu) : NVML_ERROR_INVALID_ARGUMENT;
    if (answer == NVML_SUCCESS) *device = device_of(gpu);
    return answer;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static nvmlReturn_t by_fact(const char *key, const char *wanted, nvmlDevice_t *device) {
    nvmlReturn_t answer = ask_driver();
    if (answer != NVML_SUCCESS) return answer;
    for (int gpu = 0; gpu < state_gpus(); gpu++) {
        char text[LONGEST_FACT];
        if (!fact(gpu, key, text) || strcasecmp(text, wanted) != 0) continue;
        *device = device_of(gpu);
        return ask_device(*device, &gpu);
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) { return by_fact("uuid", uuid, device); }

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) {
    return by_fact("serial", serial, device);
}

/* Takes 0000:1a:00.0 and 00000000:1A:00.0. */
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device) {
    return by_fact("pci", strlen(bus_id) == 16 ? bus_id + 4 : bus_id, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}
