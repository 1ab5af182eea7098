/* How GPUs are joined (NVLink, PCI), and the events that tell of Xid errors. */
#include "device.h"
#include "state.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What a link leads to: the word `switch`, the index of a GPU, or `-` for a link that is down. */
static nvmlReturn_t link_end(nvmlDevice_t device, unsigned int link, char word[LONGEST_FACT]) {
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer != NVML_SUCCESS) return answer;
    return fact_word(gpu, "nvlink", (int)link, word) ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, unsigned int *active) {
    char word[LONGEST_FACT];
    nvmlReturn_t answer = link_end(device, link, word);
    if (answer == NVML_SUCCESS) *active = strcmp(word, "-") != 0;
    return answer;
}

nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link, unsigned int *version) {
    char word[LONGEST_FACT];
    nvmlReturn_t answer = link_end(device, link, word);
    if (answer == NVML_SUCCESS) *version = (unsigned int)fact_number(index_of(device), "nvlink_version", 1);
    return answer;
}

nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link, unsigned int what, unsigned int *out) {
    (void)what;
    char word[LONGEST_FACT];
    nvmlReturn_t answer = link_end(device, link, word);
    if (answer == NVML_SUCCESS) *out = 1;
    return answer;
}

nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link, unsigned int counter,
                                             unsigned long long *out) {
    (void)counter;
    char word[LONGEST_FACT];
    nvmlReturn_t answer = link_end(device, link, word);
    if (answer == NVML_SUCCESS) *out = fact_number(index_of(device), "nvlink_errors", 0);
    return answer;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, unsigned int *out) {
    char word[LONGEST_FACT];
    nvmlReturn_t answer = link_end(device, link, word);
    if (answer != NVML_SUCCESS) return answer;
    if (strcmp(word, "-") == 0) return NVML_ERROR_NOT_SUPPORTED;
    *out = strcmp(word, "switch") == 0 ? NVML_LINK_TO_SWITCH : NVML_LINK_TO_GPU;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *out);

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *out) {
    char word[LONGEST_FACT];
    nvmlReturn_t answer = link_end(device, link, word);
    if (answer != NVML_SUCCESS) return answer;
    if (strcmp(word, "-") == 0) return NVML_ERROR_NOT_SUPPORTED;
    if (strcmp(word, "switch") != 0) return nvmlDeviceGetPciInfo_v3(device_of(atoi(word)), out);
    memset(out, 0, sizeof *out);
    strcpy(out->busIdLegacy, "0000:F0:00.0");
    strcpy(out->busId, "00000000:F0:00.0");
    out->bus = 0xf0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other, unsigned int *level) {
    int left, right;
    nvmlReturn_t answer = ask_device(one, &left);
    if (answer == NVML_SUCCESS) answer = ask_device(other, &right);
    if (answer != NVML_SUCCESS) return answer;
    bool near = fact_number(left, "numa", 0) == fact_number(right, "numa", 0);
    *level = near ? NVML_TOPOLOGY_HOSTBRIDGE : NVML_TOPOLOGY_SYSTEM;
    return NVML_SUCCESS;
}

/* Which Xid errors of each GPU a listener has been told of already: those further down the list are news. */
struct event_set {
    bool watched[MOST_GPUS];
    int told[MOST_GPUS];
};

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    nvmlReturn_t answer = ask_driver();
    if (answer == NVML_SUCCESS) *set = calloc(1, sizeof **set);
    return answer;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    free(set);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer == NVML_SUCCESS) *types = NVML_EVENT_XID;
    return answer;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    char word[LONGEST_FACT];
    int gpu;
    nvmlReturn_t answer = ask_device(device, &gpu);
    if (answer != NVML_SUCCESS) return answer;
    if ((types & NVML_EVENT_XID) == 0) return NVML_ERROR_NOT_SUPPORTED;
    set->watched[gpu] = true;
    while (fact_word(gpu, "xids", set->told[gpu], word)) set->told[gpu]++;
    return NVML_SUCCESS;
}

static bool next_event(nvmlEventSet_t set, nvmlEventData_t *out) {
    char word[LONGEST_FACT];
    for (int gpu = 0; gpu < MOST_GPUS; gpu++) {
        if (!set->watched[gpu] || !fact_word(gpu, "xids", set->told[gpu], word)) continue;
        set->told[gpu]++;
        memset(out, 0, sizeof *out);
        out->device = device_of(gpu);
        out->eventType = NVML_EVENT_XID;
        out->eventData = strtoull(word, NULL, 10);
        out->gpuInstanceId = out->computeInstanceId = 0xffffffff;
        return true;
    }
    return false;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *out, unsigned int timeout_ms) {
    enum { STEP_MS = 50 };
    for (unsigned int waited = 0;; waited += STEP_MS) {
        if (next_event(set, out)) return NVML_SUCCESS;
        if (waited >= timeout_ms) return NVML_ERROR_TIMEOUT;
        usleep(STEP_MS * 1000);
    }
}

nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *out, unsigned int timeout_ms) {
    return nvmlEventSetWait_v2(set, out, timeout_ms);
}
