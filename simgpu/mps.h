/* Clients of the emulated MPS; see mps.c. */
#pragma once

#include <stdbool.h>

#include "cuda_abi.h"

/* The purpose of a connection to the daemon, as in driver 550. */
enum mps_type {
    MPS_SERVER = 1,
    MPS_CLIENT = 2,
    MPS_COMMANDS = 4,
};

CUresult mps_join(void);
bool mps_client(void);
CUresult mps_fault(void);
void mps_forget(void);
