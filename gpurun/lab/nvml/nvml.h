/* The part of NVIDIA's nvml.h that the stand-in serves: same names, layouts and values (NVML API reference, R535). */
#ifndef GPURUN_LAB_NVML_H
#define GPURUN_LAB_NVML_H

typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
} nvmlReturn_t;

typedef struct device *nvmlDevice_t;
typedef struct event_set *nvmlEventSet_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned int gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

enum { NVML_EVENT_XID = 8 };                                   /* nvmlEventTypeXidCriticalError */
enum { NVML_LINK_TO_GPU = 0, NVML_LINK_TO_SWITCH = 2 };        /* nvmlIntNvLinkDeviceType_t */
enum { NVML_TOPOLOGY_HOSTBRIDGE = 30, NVML_TOPOLOGY_SYSTEM = 50 };
enum { NVML_MEMORY_ERROR_CORRECTED = 0, NVML_MEMORY_ERROR_UNCORRECTED = 1 };
enum { NVML_ARCH_AMPERE = 7 };                                 /* remaps rows where older ones retire pages */

#endif
