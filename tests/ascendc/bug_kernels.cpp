// Small kernels with one injected bug each, and correct ones beside them; test_cpu_model.py runs them by name.
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernel_operator.h"

namespace {

using namespace AscendC;

constexpr uint32_t kCount = 256;  // fp32 elements of a tile
constexpr uint32_t kBytes = kCount * sizeof(float);
constexpr uint32_t kBufferElements = 4 * kCount;  // of each global buffer

using In = TQue<TPosition::VECIN, 1>;
using Out = TQue<TPosition::VECOUT, 1>;

// What every kernel gets: two inputs, two outputs (one may be read back), a pipe.
struct Context {
    uint8_t* input;
    uint8_t* other;
    uint8_t* output;
    TPipe pipe;

    template <typename T = float>
    GlobalTensor<T> Global(uint8_t* address, uint64_t first = 0, uint64_t elements = 0) const
    {
        GlobalTensor<T> tensor;
        if (elements == 0) {
            tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address) + first);
        } else {
            tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address) + first, elements);
        }
        return tensor;
    }

    template <TPosition position, typename T = float>
    LocalTensor<T> Temporary(TBuf<position>& buffer, uint32_t bytes = kBytes)
    {
        pipe.InitBuffer(buffer, bytes);
        return buffer.template Get<T>();
    }
};

struct Case {
    const char* name;
    const char* rule;  // "" for a correct kernel
    uint32_t cores;
    std::function<void(Context&)> kernel;
};

// Three buffers outside of any queue, so that nothing synchronises by itself.
struct Manual {
    TBuf<TPosition::VECIN> in_buffer;
    TBuf<TPosition::VECCALC> calc_buffer;
    TBuf<TPosition::VECOUT> out_buffer;
    LocalTensor<float> in, calc, out;

    explicit Manual(Context& context)
        : in(context.Temporary(in_buffer)), calc(context.Temporary(calc_buffer)), out(context.Temporary(out_buffer))
    {
    }
};

template <HardEvent event>
void Order(int32_t id = EVENT_ID0)
{
    SetFlag<event>(id);
    WaitFlag<event>(id);
}

// output = input + 1 with queues; the bugs of the queues are variations of it.
void CopyIn(Context& context, In& queue)
{
    LocalTensor<float> x = queue.AllocTensor<float>();
    DataCopy(x, context.Global(context.input), kCount);
    queue.EnQue(x);
}

void AddOne(In& in, Out& out)
{
    LocalTensor<float> x = in.DeQue<float>();
    LocalTensor<float> y = out.AllocTensor<float>();
    Adds(y, x, 1.0f, kCount);
    out.EnQue(y);
    in.FreeTensor(x);
}

void CopyOut(Context& context, Out& queue, uint64_t first = 0)
{
    LocalTensor<float> y = queue.DeQue<float>();
    DataCopy(context.Global(context.output, first), y, kCount);
    queue.FreeTensor(y);
}

const std::vector<Case>& Cases()
{
    static const std::vector<Case> cases = {
        // --- correct kernels --------------------------------------------------------------------------------------
        {"correct queues", "", 1,
         [](Context& c) {
             In in;
             Out out;
             c.pipe.InitBuffer(in, 2, kBytes);
             c.pipe.InitBuffer(out, 2, kBytes);
             for (int tile = 0; tile < 4; ++tile) {
                 CopyIn(c, in);
                 AddOne(in, out);
                 CopyOut(c, out, static_cast<uint64_t>(tile) * kCount);
             }
         }},
        {"correct flags", "", 1,
         [](Context& c) {
             Manual m(c);
             DataCopy(m.in, c.Global(c.input), kCount);
             Order<HardEvent::MTE2_V>();
             Adds(m.calc, m.in, 1.0f, kCount);
             PipeBarrier<PIPE_V>();
             Muls(m.out, m.calc, 2.0f, kCount);
             Order<HardEvent::V_MTE3>();
             DataCopy(c.Global(c.output), m.out, kCount);
         }},
        {"correct cores", "", 3,
         [](Context& c) {
             Manual m(c);
             DataCopy(m.in, c.Global(c.input), kCount);  // several cores may read the same bytes
             Order<HardEvent::MTE2_V>();
             Adds(m.out, m.in, static_cast<float>(GetBlockIdx()), kCount);
             Order<HardEvent::V_MTE3>();
             DataCopy(c.Global(c.output, static_cast<uint64_t>(GetBlockIdx()) * kCount), m.out, kCount);
         }},
        {"correct in place", "", 1,
         [](Context& c) {
             Manual m(c);
             for (int pass = 0; pass < 2; ++pass) {
                 DataCopy(m.in, c.Global(c.output), kCount);
                 Order<HardEvent::MTE2_V>();
                 Adds(m.out, m.in, 1.0f, kCount);
                 Order<HardEvent::V_MTE3>();
                 DataCopy(c.Global(c.output), m.out, kCount);
                 Order<HardEvent::MTE3_MTE2>();
                 Order<HardEvent::MTE3_V>();
             }
         }},
        // --- copies -----------------------------------------------------------------------------------------------
        {"copy of 12 bytes", "copy-length", 1, [](Context& c) { DataCopy(Manual(c).in, c.Global(c.input), 3); }},
        {"padded copy of half an element", "copy-length", 1,
         [](Context& c) {
             DataCopyPad(Manual(c).in, c.Global(c.input), {1, 6, 0, 0, 0}, DataCopyPadExtParams<float>());
         }},
        {"copy to an odd UB address", "ub-alignment", 1,
         [](Context& c) { DataCopy(Manual(c).in[3], c.Global(c.input), 8); }},
        {"copy of 4096 blocks", "copy-limits", 1,
         [](Context& c) {
             DataCopyPad(Manual(c).in, c.Global(c.input), {4096, 4, 0, 0, 0}, DataCopyPadExtParams<float>());
         }},
        {"copy stride over 16 bits", "copy-limits", 1,
         [](Context& c) { DataCopy(Manual(c).in, c.Global(c.input), DataCopyParams{2, 1, 65536, 0}); }},
        {"copy into VECCALC", "copy-position", 1,
         [](Context& c) { DataCopy(Manual(c).calc, c.Global(c.input), kCount); }},
        {"copy past the end of global memory", "gm-bounds", 1,
         [](Context& c) { DataCopy(Manual(c).in, c.Global(c.input, kBufferElements - 8), 16); }},
        {"copy past the stated size of a GlobalTensor", "gm-bounds", 1,
         [](Context& c) { DataCopy(Manual(c).in, c.Global(c.input, 0, 8), 16); }},
        {"copy past the end of a UB buffer", "ub-bounds", 1,
         [](Context& c) { DataCopy(Manual(c).in[kCount - 8], c.Global(c.input), 16); }},
        {"global address inside an element", "gm-alignment", 1,
         [](Context& c) { DataCopy(Manual(c).in, c.Global(c.input + 2), 8); }},
        {"copy with padding values", "not-modelled", 1,
         [](Context& c) {
             DataCopyPadExtParams<float> padding;
             padding.isPad = true;
             DataCopyPad(Manual(c).in, c.Global(c.input), {1, 32, 0, 0, 0}, padding);
         }},
        {"write to an input", "gm-read-only", 1,
         [](Context& c) {
             Manual m(c);
             Duplicate(m.out, 1.0f, kCount);
             Order<HardEvent::V_MTE3>();
             DataCopy(c.Global(c.input), m.out, kCount);
         }},
        // --- vector instructions ------------------------------------------------------------------------------------
        {"vector operand at an odd UB address", "ub-alignment", 1,
         [](Context& c) { Duplicate(Manual(c).calc[1], 1.0f, 8); }},
        {"vector past the end of a buffer", "ub-bounds", 1,
         [](Context& c) { Duplicate(Manual(c).calc, 1.0f, kCount + 1); }},
        {"300 repeats", "repeat-limit", 1,
         [](Context& c) {
             Manual m(c);
             Duplicate(m.in, 1.0f, kCount);
             PipeBarrier<PIPE_V>();
             Adds(m.out, m.in, 1.0f, uint64_t{8}, 300, UnaryRepeatParams(1, 1, 0, 0));
         }},
        {"repeat stride of 256 blocks", "stride-limit", 1, [](Context&) { BinaryRepeatParams(1, 1, 1, 256, 8, 8); }},
        {"destination block stride 0", "stride-limit", 1,
         [](Context& c) {
             Manual m(c);
             Duplicate(m.in, 1.0f, kCount);
             PipeBarrier<PIPE_V>();
             Adds(m.out, m.in, 1.0f, uint64_t{64}, 1, UnaryRepeatParams(0, 1, 8, 8));
         }},
        {"mask of 65 fp32 lanes", "mask-limit", 1,
         [](Context& c) {
             Manual m(c);
             Duplicate(m.in, 1.0f, kCount);
             PipeBarrier<PIPE_V>();
             Adds(m.out, m.in, 1.0f, uint64_t{65}, 1, UnaryRepeatParams());
         }},
        {"bf16 addition", "data-type", 1,
         [](Context& c) {
             TBuf<TPosition::VECCALC> buffer;
             LocalTensor<bfloat16_t> x = c.Temporary<TPosition::VECCALC, bfloat16_t>(buffer);
             Duplicate(x, bfloat16_t(1.0f), 128);
             PipeBarrier<PIPE_V>();
             Add(x, x, x, 128);
         }},
        {"widening cast with a rounding", "cast-round", 1,
         [](Context& c) {
             Manual m(c);
             Cast(m.calc, m.in.ReinterpretCast<bfloat16_t>(), RoundMode::CAST_RINT, 64);
         }},
        {"narrowing cast without a rounding", "cast-round", 1,
         [](Context& c) {
             Manual m(c);
             Cast(m.out.ReinterpretCast<bfloat16_t>(), m.calc, RoundMode::CAST_NONE, 64);
         }},
        {"cast between half and bf16", "cast-type", 1,
         [](Context& c) {
             Manual m(c);
             Cast(m.out.ReinterpretCast<bfloat16_t>(), m.in.ReinterpretCast<half>(), RoundMode::CAST_RINT, 64);
         }},
        {"operands overlap partly", "overlap", 1,
         [](Context& c) {
             Manual m(c);
             Duplicate(m.calc, 1.0f, kCount);
             PipeBarrier<PIPE_V>();
             Adds(m.calc[8], m.calc, 1.0f, 64);
         }},
        {"one repeat reads what another writes", "overlap", 1,
         [](Context& c) {
             Manual m(c);
             Duplicate(m.calc, 1.0f, kCount);
             PipeBarrier<PIPE_V>();
             Adds(m.calc[64], m.calc, 1.0f, uint64_t{64}, 2, UnaryRepeatParams(1, 1, 8, 8));
         }},
        {"read of fresh memory", "poison", 1,
         [](Context& c) {
             Manual m(c);
             Adds(m.out, m.calc, 1.0f, kCount);
         }},
        {"copy out of fresh memory", "poison", 1,
         [](Context& c) { DataCopy(c.Global(c.output), Manual(c).out, kCount); }},
        // --- buffers and queues -------------------------------------------------------------------------------------
        {"more than the unified buffer", "ub-capacity", 1,
         [](Context& c) {
             In in;
             c.pipe.InitBuffer(in, 2, 97 * 1024);
         }},
        {"65 buffers", "buffer-count", 1,
         [](Context& c) {
             std::vector<TBuf<TPosition::VECCALC>> buffers(65);
             for (auto& buffer : buffers) { c.pipe.InitBuffer(buffer, 32); }
         }},
        {"nine queue buffers at a position", "queue-buffers", 1,
         [](Context& c) {
             In queues[5];
             for (In& queue : queues) { c.pipe.InitBuffer(queue, 2, 32); }
         }},
        {"missing DeQue", "queue-state", 1,
         [](Context& c) {
             In in;
             Manual m(c);
             c.pipe.InitBuffer(in, 1, kBytes);
             LocalTensor<float> x = in.AllocTensor<float>();
             DataCopy(x, c.Global(c.input), kCount);
             in.EnQue(x);
             Adds(m.out, x, 1.0f, kCount);
         }},
        {"missing EnQue", "queue-empty", 1,
         [](Context& c) {
             In in;
             Out out;
             c.pipe.InitBuffer(in, 1, kBytes);
             c.pipe.InitBuffer(out, 1, kBytes);
             LocalTensor<float> x = in.AllocTensor<float>();
             DataCopy(x, c.Global(c.input), kCount);
             AddOne(in, out);
         }},
        {"free without DeQue", "queue-state", 1,
         [](Context& c) {
             In in;
             c.pipe.InitBuffer(in, 1, kBytes);
             LocalTensor<float> x = in.AllocTensor<float>();
             in.FreeTensor(x);
         }},
        {"use after FreeTensor", "queue-state", 1,
         [](Context& c) {
             In in;
             Manual m(c);
             c.pipe.InitBuffer(in, 2, kBytes);
             CopyIn(c, in);
             LocalTensor<float> x = in.DeQue<float>();
             in.FreeTensor(x);
             Adds(m.out, x, 1.0f, kCount);
         }},
        {"double FreeTensor", "queue-state", 1,
         [](Context& c) {
             In in;
             c.pipe.InitBuffer(in, 2, kBytes);
             CopyIn(c, in);
             LocalTensor<float> x = in.DeQue<float>();
             in.FreeTensor(x);
             in.FreeTensor(x);
         }},
        {"tensor of another queue", "queue-state", 1,
         [](Context& c) {
             In one;
             In two;
             c.pipe.InitBuffer(one, 1, kBytes);
             c.pipe.InitBuffer(two, 1, kBytes);
             two.EnQue(one.AllocTensor<float>());
         }},
        {"more tensors than buffers", "queue-exhausted", 1,
         [](Context& c) {
             In in;
             c.pipe.InitBuffer(in, 1, kBytes);
             in.AllocTensor<float>();
             in.AllocTensor<float>();
         }},
        {"more tensors in the queue than its depth", "queue-depth", 1,
         [](Context& c) {
             In in;
             c.pipe.InitBuffer(in, 2, kBytes);
             CopyIn(c, in);
             CopyIn(c, in);
         }},
        {"tensor never freed", "queue-leak", 1,
         [](Context& c) {
             In in;
             c.pipe.InitBuffer(in, 1, kBytes);
             CopyIn(c, in);
             in.DeQue<float>();
         }},
        // --- races --------------------------------------------------------------------------------------------------
        {"no barrier between dependent vector instructions", "race", 1,
         [](Context& c) {
             Manual m(c);
             Duplicate(m.calc, 1.0f, kCount);
             Adds(m.out, m.calc, 1.0f, kCount);
         }},
        {"no barrier before overwriting what an instruction reads", "race", 1,
         [](Context& c) {
             Manual m(c);
             Duplicate(m.calc, 1.0f, kCount);
             PipeBarrier<PIPE_V>();
             Adds(m.out, m.calc, 1.0f, kCount);
             Duplicate(m.calc, 2.0f, kCount);
         }},
        {"vector does not wait for the copy in", "race", 1,
         [](Context& c) {
             Manual m(c);
             DataCopy(m.in, c.Global(c.input), kCount);
             Adds(m.out, m.in, 1.0f, kCount);
         }},
        {"copy out does not wait for the vector", "race", 1,
         [](Context& c) {
             Manual m(c);
             Duplicate(m.out, 1.0f, kCount);
             PipeBarrier<PIPE_V>();
             DataCopy(c.Global(c.output), m.out, kCount);
         }},
        {"copy in overwrites what the vector still reads", "race", 1,
         [](Context& c) {
             Manual m(c);
             DataCopy(m.in, c.Global(c.input), kCount);
             Order<HardEvent::MTE2_V>();
             Adds(m.out, m.in, 1.0f, kCount);
             PipeBarrier<PIPE_MTE2>();
             DataCopy(m.in, c.Global(c.other), kCount);
         }},
        {"vector overwrites what is still being copied out", "race", 1,
         [](Context& c) {
             Manual m(c);
             Duplicate(m.out, 1.0f, kCount);
             Order<HardEvent::V_MTE3>();
             DataCopy(c.Global(c.output), m.out, kCount);
             PipeBarrier<PIPE_V>();
             Duplicate(m.out, 2.0f, kCount);
         }},
        {"flag of the wrong pair of pipes", "race", 1,
         [](Context& c) {
             Manual m(c);
             DataCopy(m.in, c.Global(c.input), kCount);
             Order<HardEvent::MTE2_MTE3>();
             Adds(m.out, m.in, 1.0f, kCount);
         }},
        {"flag set before the copy it stands for", "race", 1,
         [](Context& c) {
             Manual m(c);
             SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
             DataCopy(m.in, c.Global(c.input), kCount);
             WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
             Adds(m.out, m.in, 1.0f, kCount);
         }},
        {"copy in reads global memory still being written", "race", 1,
         [](Context& c) {
             Manual m(c);
             Duplicate(m.out, 1.0f, kCount);
             Order<HardEvent::V_MTE3>();
             DataCopy(c.Global(c.output), m.out, kCount);
             DataCopy(m.in, c.Global(c.output), kCount);
         }},
        {"two copies out to the same place", "race", 1,
         [](Context& c) {
             Manual m(c);
             Duplicate(m.out, 1.0f, kCount);
             Order<HardEvent::V_MTE3>();
             DataCopy(c.Global(c.output), m.out, kCount);
             DataCopy(c.Global(c.output), m.out, kCount);
         }},
        {"scalar read does not wait for the vector", "race", 1,
         [](Context& c) {
             Manual m(c);
             Duplicate(m.calc, 1.0f, kCount);
             m.calc.GetValue(0);
         }},
        // --- cores --------------------------------------------------------------------------------------------------
        {"two cores write the same rows", "core-conflict", 2,
         [](Context& c) {
             Manual m(c);
             Duplicate(m.out, 1.0f, kCount);
             Order<HardEvent::V_MTE3>();
             DataCopy(c.Global(c.output), m.out, kCount);
         }},
        {"a core reads what another writes", "core-conflict", 2,
         [](Context& c) {
             Manual m(c);
             if (GetBlockIdx() == 0) {
                 Duplicate(m.out, 1.0f, kCount);
                 Order<HardEvent::V_MTE3>();
                 DataCopy(c.Global(c.output), m.out, kCount);
             } else {
                 DataCopy(m.in, c.Global(c.output), kCount);
             }
         }},
        {"a core writes what another has read", "core-conflict", 2,
         [](Context& c) {
             Manual m(c);
             if (GetBlockIdx() == 0) {
                 DataCopy(m.in, c.Global(c.output), kCount);
             } else {
                 Duplicate(m.out, 1.0f, kCount);
                 Order<HardEvent::V_MTE3>();
                 DataCopy(c.Global(c.output), m.out, kCount);
             }
         }},
        // --- flags --------------------------------------------------------------------------------------------------
        {"flag never waited for", "flag-leak", 1, [](Context&) { SetFlag<HardEvent::MTE2_V>(EVENT_ID0); }},
        {"wait for a flag never set", "flag-pairing", 1, [](Context&) { WaitFlag<HardEvent::MTE2_V>(EVENT_ID0); }},
        {"flag set twice", "flag-pairing", 1,
         [](Context&) {
             SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
             SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
         }},
        {"wait for another event id", "flag-pairing", 1,
         [](Context&) {
             SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
             WaitFlag<HardEvent::MTE2_V>(EVENT_ID1);
         }},
        {"event id 8", "event-id", 1, [](Context&) { SetFlag<HardEvent::MTE2_V>(8); }},
        {"nine events", "event-exhausted", 1,
         [](Context& c) {
             for (int i = 0; i < 9; ++i) { c.pipe.AllocEventID<HardEvent::V_MTE2>(); }
         }},
    };
    return cases;
}

}  // namespace

extern "C" {

int64_t NumCases()
{ return static_cast<int64_t>(Cases().size()); }
const char* CaseName(int64_t index)
{ return Cases()[static_cast<size_t>(index)].name; }
const char* CaseRule(int64_t index)
{ return Cases()[static_cast<size_t>(index)].rule; }

// Runs a case; the message is empty when no rule was broken. `output` receives the first output buffer.
void RunCase(int64_t index, float* output, char* message, int64_t message_size)
{
    const Case& entry = Cases()[static_cast<size_t>(index)];
    std::vector<float> input(kBufferElements, 1.0f);
    std::vector<float> other(kBufferElements, 2.0f);
    std::vector<float> result(kBufferElements, 0.0f);
    const auto bytes = [](std::vector<float>& values) { return reinterpret_cast<uint8_t*>(values.data()); };
    ascendc_model::GlobalMemory memory;
    memory.Register("input", input.data(), input.size() * sizeof(float), false);
    memory.Register("other", other.data(), other.size() * sizeof(float), false);
    memory.Register("output", result.data(), result.size() * sizeof(float), true);
    const ascendc_model::LaunchResult run = ascendc_model::Launch(memory, entry.cores, [&] {
        Context context{bytes(input), bytes(other), bytes(result), {}};
        entry.kernel(context);
    });
    std::memcpy(output, result.data(), result.size() * sizeof(float));
    std::strncpy(message, run.violation.c_str(), static_cast<size_t>(message_size - 1));
    message[message_size - 1] = '\0';
}

// Rounds `count` floats to 16 bits by a RoundMode.
void RoundTo16(const float* from, uint16_t* to, int64_t count, int64_t to_bf16, int64_t mode)
{
    for (int64_t i = 0; i < count; ++i) {
        to[i] = to_bf16 != 0 ? bfloat16_t::Rounded(from[i], static_cast<RoundMode>(mode)).bits
                             : half::Rounded(from[i], static_cast<RoundMode>(mode)).bits;
    }
}

void WidenFrom16(const uint16_t* from, float* to, int64_t count, int64_t from_bf16)
{
    for (int64_t i = 0; i < count; ++i) {
        bfloat16_t wide;
        half narrow;
        wide.bits = narrow.bits = from[i];
        to[i] = from_bf16 != 0 ? static_cast<float>(wide) : static_cast<float>(narrow);
    }
}

}  // extern "C"
