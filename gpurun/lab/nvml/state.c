#include "state.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *path(void) {
    const char *told = getenv("GPURUN_LAB_GPUS");
    return told != NULL && *told != '\0' ? told : "/run/gpurun-lab/gpus.ini";
}

bool state_exists(void) { return access(path(), R_OK) == 0; }

/* Cut blanks off both ends, in place. */
static char *trimmed(char *text) {
    while (isspace((unsigned char)*text)) text++;
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1])) end--;
    *end = '\0';
    return text;
}

/* Whether a line opens a section; its name is then left in `line`. */
static bool is_section(char **line) {
    size_t length = strlen(*line);
    if (length < 2 || (*line)[0] != '[' || (*line)[length - 1] != ']') return false;
    (*line)[length - 1] = '\0';
    *line = trimmed(*line + 1);
    return true;
}

static void section_name(int gpu, char out[32]) {
    if (gpu == DRIVER) snprintf(out, 32, "driver");
    else snprintf(out, 32, "gpu %d", gpu);
}

/* Find a key in a section, or with key NULL just the section. */
static bool find(int gpu, const char *key, char out[LONGEST_FACT]) {
    FILE *file = fopen(path(), "re");
    if (file == NULL) return false;
    char wanted[32], buffer[4096];
    section_name(gpu, wanted);
    bool inside = false, found = false;
    while (!found && fgets(buffer, sizeof buffer, file) != NULL) {
        char *line = trimmed(buffer);
        if (*line == '\0' || *line == '#' || *line == ';') continue;
        if (is_section(&line)) {
            inside = strcmp(line, wanted) == 0;
            found = inside && key == NULL;
            continue;
        }
        char *equals = strchr(line, '=');
        if (!inside || key == NULL || equals == NULL) continue;
        *equals = '\0';
        if (strcmp(trimmed(line), key) != 0) continue;
        snprintf(out, LONGEST_FACT, "%.*s", LONGEST_FACT - 1, trimmed(equals + 1));
        found = true;
    }
    fclose(file);
    return found;
}

bool state_has(int gpu) { return gpu >= 0 && gpu < MOST_GPUS && find(gpu, NULL, NULL); }

int state_gpus(void) {
    int gpus = 0;
    while (state_has(gpus)) gpus++;
    return gpus;
}

bool fact(int gpu, const char *key, char out[LONGEST_FACT]) { return find(gpu, key, out) && *out != '\0'; }

unsigned long long fact_number(int gpu, const char *key, unsigned long long otherwise) {
    char text[LONGEST_FACT];
    if (!fact(gpu, key, text)) return otherwise;
    char *end = text;
    unsigned long long number = strtoull(text, &end, 0);
    return end == text ? otherwise : number;
}

bool fact_word(int gpu, const char *key, int place, char out[LONGEST_FACT]) {
    char text[LONGEST_FACT], *rest = NULL;
    if (place < 0 || !fact(gpu, key, text)) return false;
    for (char *word = strtok_r(text, " ,", &rest); word != NULL; word = strtok_r(NULL, " ,", &rest)) {
        if (place-- == 0) {
            snprintf(out, LONGEST_FACT, "%s", word);
            return true;
        }
    }
    return false;
}
