// The header every Ascend C kernel includes; here it is a CPU model of the part of the API that vector kernels use.
#pragma once

// The name under which the vendor's own CPU mode announces itself; kernels hide their <<<>>> launch behind it.
#define ASCENDC_CPU_DEBUG 1

#define __global__
#define __aicore__
#define __gm__
#define __ubuf__
#define GM_ADDR uint8_t*
#define KERNEL_TASK_TYPE_DEFAULT(type)

#include "ascendc_model/data_copy.h"
#include "ascendc_model/launch.h"
#include "ascendc_model/vector_ops.h"
