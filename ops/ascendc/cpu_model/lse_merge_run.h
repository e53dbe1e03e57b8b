// Runs an lse_merge kernel, the real one or a mutant of the tests, on simulated cores.
#pragma once

#include <cstring>
#include <string>

#include "kernel_operator.h"
#include "lse_merge_table.h"

using LseMergeKernel = void(uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*);

inline int64_t ReportMessage(const std::string& message, char* text, int64_t size)
{
    std::strncpy(text, message.c_str(), static_cast<size_t>(size - 1));
    text[size - 1] = '\0';
    return -1;
}

// Runs `kernel` on the cores that the table names. Returns 0, or -1 with the violated rule. `counters` receives
// bytes read, bytes written, bytes of unified buffer, cost of the busiest pipe, cost of the slowest core.
inline int64_t RunLseMergeKernel(LseMergeKernel* kernel, void* out, void* running_max, void* running_sum,
                                 void* part_out, void* part_max, void* part_sum, uint32_t* table, int64_t words,
                                 uint64_t* counters, char* message, int64_t message_size)
{
    const uint64_t rows = table[pa_npu::kHeaderOutRows];
    const uint64_t part_rows = table[pa_npu::kHeaderPartRows];
    const bool is_float = table[pa_npu::kHeaderElementType] == static_cast<uint32_t>(pa_npu::ElementType::kFloat);
    const uint64_t row_bytes = static_cast<uint64_t>(table[pa_npu::kHeaderDim]) * (is_float ? 4 : 2);
    ascendc_model::GlobalMemory memory;
    memory.Register("out", out, rows * row_bytes, true);
    memory.Register("max", running_max, rows * pa_npu::kStatBytes, true);
    memory.Register("sum", running_sum, rows * pa_npu::kStatBytes, true);
    memory.Register("part_out", part_out, part_rows * row_bytes, false);
    memory.Register("part_max", part_max, part_rows * pa_npu::kStatBytes, false);
    memory.Register("part_sum", part_sum, part_rows * pa_npu::kStatBytes, false);
    memory.Register("table", table, static_cast<uint64_t>(words) * sizeof(uint32_t), false);

    const auto bytes = [](void* pointer) { return static_cast<uint8_t*>(pointer); };
    const ascendc_model::LaunchResult result = ascendc_model::Launch(memory, table[pa_npu::kHeaderNumCores], [&] {
        kernel(bytes(out), bytes(running_max), bytes(running_sum), bytes(part_out), bytes(part_max), bytes(part_sum),
               bytes(table));
    });
    counters[0] = result.counters.gm_read_bytes;
    counters[1] = result.counters.gm_written_bytes;
    counters[2] = result.counters.ub_bytes;
    counters[3] = result.counters.busiest_pipe;
    counters[4] = result.counters.makespan;
    return result.violation.empty() ? 0 : ReportMessage(result.violation, message, message_size);
}
