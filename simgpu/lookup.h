/* Finds functions in the library by base name, version and kind of default stream. */
#pragma once

#include <stdint.h>

#include "cuda_abi.h"

typedef void any_function(void);

/* Set by lookup.c, which has the addresses of all functions. */
extern any_function *(*lookup)(const char *name, int version, uint64_t flags,
                               CUdriverProcAddressQueryResult *statusp);
