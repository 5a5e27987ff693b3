/* Types of the driver API that describe copies, fills and graphs; see cuda_abi.h. */
#pragma once

#include <stddef.h>
#include <stdint.h>
