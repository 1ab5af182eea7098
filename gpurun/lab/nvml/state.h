/* What the stand-in knows: facts from an ini file, read again at every question. See gpurun/lab/gpus/state.py. */
#ifndef GPURUN_LAB_STATE_H
#define GPURUN_LAB_STATE_H

#include <stdbool.h>
#include <stddef.h>

enum { DRIVER = -1, MOST_GPUS = 16, LONGEST_FACT = 256 };

/* Whether there is a state file at all: no file, no driver. */
bool state_exists(void);

/* Whether there is a section [gpu N]. */
bool state_has(int gpu);

/* How many sections [gpu N] there are, N = 0, 1, 2 … without a gap. */
int state_gpus(void);

/* Copy the value of a key of GPU `gpu`, or of [driver], into `out`. False if there is no such key or section. */
bool fact(int gpu, const char *key, char out[LONGEST_FACT]);

/* The same as a number; `otherwise` if there is none. Hexadecimal with 0x. */
unsigned long long fact_number(int gpu, const char *key, unsigned long long otherwise);

/* The entry number `place` of a value that is a list of words. False if the list is shorter. */
bool fact_word(int gpu, const char *key, int place, char out[LONGEST_FACT]);

#endif
