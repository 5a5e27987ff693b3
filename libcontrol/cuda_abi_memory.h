/* Types of the driver API that describe device memory; see cuda_abi.h. */
#pragma once

#include <stddef.h>
#include <stdint.h>
