// Runs a kernel on several simulated cores, one after the other, and reports the first violation.
#pragma once

#include <functional>
#include <string>

#include "core.h"

namespace ascendc_model {

struct LaunchResult {
    std::string violation;  // empty when every rule held
    Counters counters;
};

// `kernel` is called once per core. Cores share `memory` only; which bytes each touches is checked, so running them
// in turn gives the result that any interleaving would give.
inline LaunchResult Launch(GlobalMemory& memory, uint32_t num_cores, const std::function<void()>& kernel)
{
    LaunchResult result;
    uint32_t time = 0;
    for (uint32_t index = 0; index < num_cores && result.violation.empty(); ++index) {
        Core core(memory, index, num_cores, time);
        Core::SetCurrent(&core);
        try {
            kernel();
            core.Finish();
        } catch (const Violation& violation) {
            result.violation = violation.what();
        }
        Core::SetCurrent(nullptr);
        time = core.time();
        const Counters& counters = core.counters();
        result.counters.instructions += counters.instructions;
        result.counters.gm_read_bytes += counters.gm_read_bytes;
        result.counters.gm_written_bytes += counters.gm_written_bytes;
        result.counters.vector_repeats += counters.vector_repeats;
        result.counters.busiest_pipe = std::max(result.counters.busiest_pipe, counters.busiest_pipe);
        result.counters.ub_bytes = std::max(result.counters.ub_bytes, counters.ub_bytes);
        result.counters.makespan = std::max(result.counters.makespan, counters.makespan);
    }
    return result;
}

}  // namespace ascendc_model

namespace AscendC {

inline int64_t GetBlockIdx()
{ return ascendc_model::Core::Current().index(); }
inline int64_t GetBlockNum()
{ return ascendc_model::Core::Current().count(); }

}  // namespace AscendC
