// C interface to the unmodified lse_merge kernel under the CPU model, for the tests.
#include <algorithm>
#include <stdexcept>

#include "lse_merge_kernel.cpp"
#include "lse_merge_run.h"
#include "lse_merge_tiling.h"

extern "C" {

// Writes the table of a merge; returns its words, or -1 with a message when the problem is invalid.
int64_t MakeLseMergeTable(const int64_t* intervals, int64_t num_intervals, const int64_t* segments,
                          int64_t num_segments, const int64_t* part_segments, int64_t num_part_segments, int64_t tokens,
                          int64_t heads, int64_t dim, int64_t type, int64_t ntd, int64_t part_ntd, int64_t max_cores,
                          uint32_t* table, int64_t capacity, char* message, int64_t message_size)
{
    pa_npu::MergeProblem problem;
    for (int64_t i = 0; i < num_intervals; ++i) {
        problem.intervals.emplace_back(intervals[2 * i], intervals[2 * i + 1]);
    }
    problem.tokens = tokens;
    problem.heads = heads;
    problem.dim = dim;
    problem.type = static_cast<pa_npu::ElementType>(type);
    problem.ntd = ntd != 0;
    problem.part_ntd = part_ntd != 0;
    problem.segments.assign(segments, segments + num_segments);
    problem.part_segments.assign(part_segments, part_segments + num_part_segments);
    problem.max_cores = max_cores;
    try {
        const std::vector<uint32_t> words = pa_npu::MakeTable(problem);
        if (static_cast<int64_t>(words.size()) > capacity) {
            return ReportMessage("the table has more words than the caller's buffer", message, message_size);
        }
        std::copy(words.begin(), words.end(), table);
        return static_cast<int64_t>(words.size());
    } catch (const std::invalid_argument& error) {
        return ReportMessage(error.what(), message, message_size);
    }
}

int64_t RunLseMerge(void* out, void* running_max, void* running_sum, void* part_out, void* part_max, void* part_sum,
                    uint32_t* table, int64_t words, uint64_t* counters, char* message, int64_t message_size)
{
    return RunLseMergeKernel(pa_npu_lse_merge, out, running_max, running_sum, part_out, part_max, part_sum, table,
                             words, counters, message, message_size);
}

}  // extern "C"
