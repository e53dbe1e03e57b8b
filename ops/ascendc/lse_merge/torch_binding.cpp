// torch operators of lse_merge: the merge on NPU tensors (PrivateUse1), its shape check (Meta), and the host's table.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <acl/acl.h>
#include <torch/library.h>
#include <torch_npu/csrc/core/npu/NPUGuard.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <algorithm>
#include <stdexcept>

#include "lse_merge_tiling.h"

namespace pa_npu {

// Launches the kernel; defined beside it and compiled for the device.
void LaunchLseMerge(uint32_t numCores, void* stream, uint8_t* out, uint8_t* runningMax, uint8_t* runningSum,
                    uint8_t* partOut, uint8_t* partMax, uint8_t* partSum, uint8_t* table);

namespace {

ElementType ElementTypeOf(at::ScalarType dtype)
{
    switch (dtype) {
        case at::kFloat:
            return ElementType::kFloat;
        case at::kHalf:
            return ElementType::kHalf;
        case at::kBFloat16:
            return ElementType::kBfloat16;
        default:
            TORCH_CHECK(false, "lse_merge: outputs must be float32, float16 or bfloat16, are ", dtype);
    }
}

// Vector cores of a device: the most cores that a launch may use.
int64_t VectorCores(int64_t device_index)
{
    int64_t cores = 0;
    const aclError status =
        aclGetDeviceCapability(static_cast<uint32_t>(device_index), ACL_DEVICE_INFO_VECTOR_CORE_NUM, &cores);
    TORCH_CHECK(status == ACL_SUCCESS && cores > 0, "lse_merge: aclGetDeviceCapability of device ", device_index,
                " returned ", status, " and ", cores, " vector cores");
    return cores;
}

int64_t HeaderWords()
{ return kHeaderWords; }

// The table of a merge as an int32 CPU tensor; see lse_merge_tiling.h. `intervals` holds first and last + 1 in turn.
at::Tensor LseMergeTable(at::IntArrayRef intervals, at::IntArrayRef segments, at::IntArrayRef part_segments,
                         int64_t tokens, int64_t heads, int64_t dim, at::ScalarType dtype, bool ntd, bool part_ntd,
                         int64_t max_cores)
{
    TORCH_CHECK(intervals.size() % 2 == 0, "lse_merge: intervals must be pairs, there are ", intervals.size(),
                " numbers");
    MergeProblem problem;
    for (size_t i = 0; i < intervals.size(); i += 2) { problem.intervals.emplace_back(intervals[i], intervals[i + 1]); }
    problem.tokens = tokens;
    problem.heads = heads;
    problem.dim = dim;
    problem.type = ElementTypeOf(dtype);
    problem.ntd = ntd;
    problem.part_ntd = part_ntd;
    problem.segments = segments.vec();
    problem.part_segments = part_segments.vec();
    problem.max_cores = max_cores;
    try {
        const std::vector<uint32_t> words = MakeTable(problem);
        at::Tensor table = at::empty({static_cast<int64_t>(words.size())}, at::kInt);
        std::copy(words.begin(), words.end(), reinterpret_cast<uint32_t*>(table.data_ptr<int32_t>()));
        return table;
    } catch (const std::invalid_argument& error) {
        TORCH_CHECK_VALUE(false, error.what());
    }
}

void CheckStats(const at::Tensor& stats, const char* name, const at::Tensor& out)
{
    TORCH_CHECK(stats.scalar_type() == at::kFloat && stats.dim() == 3 && stats.size(0) == out.size(0) &&
                    stats.size(1) == out.size(1) && stats.size(2) == kStatWidth,
                "lse_merge: ", name, " must be float32 [rows, heads, ", kStatWidth, "] like its output, is ",
                stats.scalar_type(), " ", stats.sizes());
    TORCH_CHECK(stats.is_contiguous(), "lse_merge: ", name, " must be contiguous");
}

// `header`: the first words of the table, kept on the host; they must be those of exactly these tensors.
void CheckMerge(const at::Tensor& out, const at::Tensor& running_max, const at::Tensor& running_sum,
                const at::Tensor& part_out, const at::Tensor& part_max, const at::Tensor& part_sum,
                const at::Tensor& table, at::IntArrayRef header)
{
    TORCH_CHECK(out.dim() == 3 && part_out.dim() == 3 && out.size(1) == part_out.size(1) &&
                    out.size(2) == part_out.size(2) && out.scalar_type() == part_out.scalar_type(),
                "lse_merge: outputs must be [rows, heads, dim] of one type, are ", out.sizes(), " ", out.scalar_type(),
                " and ", part_out.sizes(), " ", part_out.scalar_type());
    TORCH_CHECK(out.is_contiguous() && part_out.is_contiguous(), "lse_merge: outputs must be contiguous");
    CheckStats(running_max, "running_max", out);
    CheckStats(running_sum, "running_sum", out);
    CheckStats(part_max, "part_max", part_out);
    CheckStats(part_sum, "part_sum", part_out);
    TORCH_CHECK(header.size() == kHeaderWords && header[kHeaderVersion] == kTableVersion &&
                    header[kHeaderElementType] == static_cast<int64_t>(ElementTypeOf(out.scalar_type())) &&
                    header[kHeaderDim] == out.size(2) && header[kHeaderOutRows] == out.size(0) * out.size(1) &&
                    header[kHeaderPartRows] == part_out.size(0) * part_out.size(1),
                "lse_merge: the table was made for other tensors, its header is ", header, " for outputs ", out.sizes(),
                " and ", part_out.sizes());
    const int64_t words = kHeaderWords + header[kHeaderNumCores] * kCoreWords + header[kHeaderNumPieces] * kPieceWords;
    TORCH_CHECK(table.scalar_type() == at::kInt && table.is_contiguous() && table.numel() == words,
                "lse_merge: the table must hold ", words, " int32 words, holds ", table.numel());
}

void LseMergeMeta(at::Tensor& out, at::Tensor& running_max, at::Tensor& running_sum, const at::Tensor& part_out,
                  const at::Tensor& part_max, const at::Tensor& part_sum, const at::Tensor& table,
                  at::IntArrayRef header)
{ CheckMerge(out, running_max, running_sum, part_out, part_max, part_sum, table, header); }

void LseMergeNpu(at::Tensor& out, at::Tensor& running_max, at::Tensor& running_sum, const at::Tensor& part_out,
                 const at::Tensor& part_max, const at::Tensor& part_sum, const at::Tensor& table,
                 at::IntArrayRef header)
{
    CheckMerge(out, running_max, running_sum, part_out, part_max, part_sum, table, header);
    const std::initializer_list<const at::Tensor*> others = {&running_max, &running_sum, &part_out,
                                                             &part_max,    &part_sum,    &table};
    for (const at::Tensor* tensor : others) {
        TORCH_CHECK(tensor->device() == out.device(), "lse_merge: all tensors must be on ", out.device(),
                    ", one is on ", tensor->device());
    }
    const uint32_t num_cores = static_cast<uint32_t>(header[kHeaderNumCores]);
    if (num_cores == 0) { return; }
    const c10_npu::OptionalNPUGuard guard(out.device());
    void* stream = c10_npu::getCurrentNPUStream().stream(false);
    const auto address = [](const at::Tensor& tensor) { return static_cast<uint8_t*>(tensor.data_ptr()); };
    // The handler runs in torch_npu's task queue, in order with the other operators of the stream.
    const auto launch = [=, o = address(out), m = address(running_max), s = address(running_sum),
                         po = address(part_out), pm = address(part_max), ps = address(part_sum),
                         t = address(table)]() -> int {
        LaunchLseMerge(num_cores, stream, o, m, s, po, pm, ps, t);
        return 0;
    };
    at_npu::native::OpCommand command;
    command.Name("pa_npu_lse_merge");
    command.SetCustomHandler(launch);
    command.Run();
}

}  // namespace
}  // namespace pa_npu

TORCH_LIBRARY_FRAGMENT(pa_npu, library)
{
    library.def(
        "lse_merge_(Tensor(a!) out, Tensor(b!) running_max, Tensor(c!) running_sum, Tensor part_out, Tensor part_max, "
        "Tensor part_sum, Tensor table, int[] header) -> ()");
    library.def(
        "lse_merge_table(int[] intervals, int[] segments, int[] part_segments, int tokens, int heads, int dim, "
        "ScalarType dtype, bool ntd, bool part_ntd, int max_cores) -> Tensor",
        &pa_npu::LseMergeTable);
    library.def("lse_merge_header_words() -> int", &pa_npu::HeaderWords);
    library.def("vector_cores(int device_index) -> int", &pa_npu::VectorCores);
}

TORCH_LIBRARY_IMPL(pa_npu, PrivateUse1, library)
{ library.impl("lse_merge_", &pa_npu::LseMergeNpu); }

TORCH_LIBRARY_IMPL(pa_npu, Meta, library)
{ library.impl("lse_merge_", &pa_npu::LseMergeMeta); }
