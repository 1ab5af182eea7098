/* How every function of the stand-in begins: is the library in use, is there a driver, is the GPU there? */
#ifndef GPURUN_LAB_DEVICE_H
#define GPURUN_LAB_DEVICE_H

#include "nvml.h"

/* To be called first by whatever asks the driver: waits `hang_s` seconds, as a driver that hangs would. */
nvmlReturn_t ask_driver(void);

/* The same for one GPU, whose index it leaves in `gpu`; gives the GPU's own planted `error`, such as 15 = lost. */
nvmlReturn_t ask_device(nvmlDevice_t device, int *gpu);

nvmlDevice_t device_of(int gpu);
int index_of(nvmlDevice_t device);

/* Copy text out as NVML does: INSUFFICIENT_SIZE if it does not fit with its end. */
nvmlReturn_t give_text(const char *text, char *out, unsigned int length);

#endif
