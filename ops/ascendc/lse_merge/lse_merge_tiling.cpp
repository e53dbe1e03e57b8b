// Host side of lse_merge: cuts the intervals into pieces, the pieces into equal shares per core, and sizes the tile.
#include "lse_merge_tiling.h"

#include <algorithm>
#include <limits>
#include <sstream>
#include <stdexcept>

namespace pa_npu {
namespace {

constexpr uint32_t kUbBudget = 184 * 1024;  // of 192 KiB; the framework may use the last 8 KiB itself
constexpr uint32_t kMaxTileRows = 255;      // one repeat per work row
constexpr uint32_t kMaxTileCols = 2032;     // 255 blocks of 8 fp32 elements, rounded down to whole steps
constexpr uint32_t kColumnStep = 16;        // 32 bytes of a 2-byte type
constexpr uint64_t kMinRowsPerCore = 8;
constexpr uint64_t kMaxWord = std::numeric_limits<uint32_t>::max();

template <typename... Parts>
void Require(bool holds, const Parts&... parts)
{
    if (!holds) {
        std::ostringstream text;
        text << "lse_merge: ";
        (text << ... << parts);
        throw std::invalid_argument(text.str());
    }
}

uint32_t ElementBytes(ElementType type)
{ return type == ElementType::kFloat ? 4 : 2; }

// Sequences of a call, to find where the statistics of a token row lie.
class Segments {
public:
    Segments(const std::vector<int64_t>& lengths, int64_t total, const char* name) : starts_{0}
    {
        for (size_t i = 0; i < lengths.size(); ++i) {
            Require(lengths[i] >= 0, name, "[", i, "] is ", lengths[i], ", lengths are at least 0");
            starts_.push_back(starts_.back() + lengths[i]);
        }
        Require(starts_.back() == total, name, " add up to ", starts_.back(), " rows, the statistics have ", total);
    }

    // Moves on to the segment of `row`; rows are asked for in ascending order.
    void Seek(int64_t row)
    {
        while (starts_[at_ + 1] <= row) { ++at_; }
    }
    int64_t start() const { return starts_[at_]; }
    int64_t end() const { return starts_[at_ + 1]; }

private:
    std::vector<int64_t> starts_;
    size_t at_ = 0;
};

// Where the statistics of a run of token rows start, and how far apart tokens and heads are, in work rows.
struct StatWalk {
    uint64_t base;
    uint64_t token_stride;
    uint64_t head_stride;
};

StatWalk WalkStats(bool ntd, int64_t row, const Segments* segments, uint64_t heads)
{
    if (!ntd) { return {static_cast<uint64_t>(row) * heads, heads, 1}; }
    const uint64_t length = static_cast<uint64_t>(segments->end() - segments->start());
    return {static_cast<uint64_t>(segments->start()) * heads + static_cast<uint64_t>(row - segments->start()), 1,
            length};
}

class TableBuilder {
public:
    explicit TableBuilder(const MergeProblem& problem) : problem_(problem), heads_(static_cast<uint64_t>(problem.heads))
    {
    }

    // Token rows [row, row + count) of the running result with rows from `part_row` of the partial one.
    void Add(int64_t row, int64_t part_row, int64_t count, const Segments* segments, const Segments* part_segments)
    {
        const uint64_t tokens = static_cast<uint64_t>(count);
        const StatWalk stat = WalkStats(problem_.ntd, row, segments, heads_);
        const StatWalk part = WalkStats(problem_.part_ntd, part_row, part_segments, heads_);
        const uint64_t base = static_cast<uint64_t>(row) * heads_;
        const uint64_t part_base = static_cast<uint64_t>(part_row) * heads_;
        if (!problem_.ntd && !problem_.part_ntd) {
            // Everything is contiguous: one run over tokens and heads.
            AddPiece(tokens * heads_, 1, {base, part_base, 1, 0, stat.base, 1, 0, part.base, 1, 0});
        } else if (tokens >= heads_) {
            // Along the tokens of one head: the statistics are contiguous, the outputs one vector per heads_ vectors.
            AddPiece(tokens, heads_,
                     {base, part_base, heads_, 1, stat.base, stat.token_stride, stat.head_stride, part.base,
                      part.token_stride, part.head_stride});
        } else {
            // Along the heads of one token, when there are more heads than tokens.
            AddPiece(heads_, tokens,
                     {base, part_base, 1, heads_, stat.base, stat.head_stride, stat.token_stride, part.base,
                      part.head_stride, part.token_stride});
        }
    }

    std::vector<uint32_t> Finish(int64_t part_tokens) const
    {
        const uint64_t wanted = (total_rows_ + kMinRowsPerCore - 1) / kMinRowsPerCore;
        const uint64_t cores = std::min(wanted, static_cast<uint64_t>(problem_.max_cores));
        const uint64_t rows_per_core = cores == 0 ? 0 : (total_rows_ + cores - 1) / cores;
        const TileSize tile = ChooseTile(static_cast<uint32_t>(problem_.dim), problem_.type, rows_per_core);

        std::vector<uint32_t> table(kHeaderWords, 0);
        table[kHeaderVersion] = kTableVersion;
        table[kHeaderElementType] = static_cast<uint32_t>(problem_.type);
        table[kHeaderDim] = static_cast<uint32_t>(problem_.dim);
        table[kHeaderTileRows] = tile.rows;
        table[kHeaderTileCols] = tile.cols;
        table[kHeaderNumCores] = static_cast<uint32_t>(cores);
        table[kHeaderNumPieces] = static_cast<uint32_t>(piece_rows_.size());
        table[kHeaderOutRows] = static_cast<uint32_t>(static_cast<uint64_t>(problem_.tokens) * heads_);
        table[kHeaderPartRows] = static_cast<uint32_t>(static_cast<uint64_t>(part_tokens) * heads_);
        AppendCores(cores, table);
        table.insert(table.end(), pieces_.begin(), pieces_.end());
        return table;
    }

private:
    void AddPiece(uint64_t inner, uint64_t outer, std::initializer_list<uint64_t> words)
    {
        const size_t end = pieces_.size() + kPieceWords;
        pieces_.push_back(static_cast<uint32_t>(inner));
        pieces_.push_back(static_cast<uint32_t>(outer));
        for (uint64_t word : words) { pieces_.push_back(static_cast<uint32_t>(word)); }
        pieces_.resize(end, 0);
        piece_rows_.push_back(inner * outer);
        total_rows_ += inner * outer;
    }

    // Core c takes work rows [total * c / cores, total * (c + 1) / cores): shares differ by one row at most.
    void AppendCores(uint64_t cores, std::vector<uint32_t>& table) const
    {
        uint64_t piece = 0;
        uint64_t piece_start = 0;
        for (uint64_t core = 0; core < cores; ++core) {
            const uint64_t first = total_rows_ * core / cores;
            const uint64_t last = total_rows_ * (core + 1) / cores;
            while (piece_start + piece_rows_[piece] <= first) {
                piece_start += piece_rows_[piece];
                ++piece;
            }
            table.push_back(static_cast<uint32_t>(piece));
            table.push_back(static_cast<uint32_t>(first - piece_start));
            table.push_back(static_cast<uint32_t>(last - first));
            table.push_back(0);
        }
    }

    const MergeProblem& problem_;
    uint64_t heads_;
    std::vector<uint32_t> pieces_;
    std::vector<uint64_t> piece_rows_;
    uint64_t total_rows_ = 0;
};

void CheckShape(const MergeProblem& p)
{
    Require(p.heads >= 1 && p.tokens >= 0, "needs heads >= 1 and tokens >= 0, has ", p.heads, " and ", p.tokens);
    Require(p.dim >= kColumnStep && p.dim % kColumnStep == 0, "the head dimension must be a multiple of ", kColumnStep,
            ", is ", p.dim);
    Require(p.max_cores >= 1, "needs at least one vector core, has ", p.max_cores);
    Require(static_cast<uint64_t>(p.tokens) * static_cast<uint64_t>(p.heads) <= kMaxWord, "tokens * heads of ",
            p.tokens, " * ", p.heads, " exceeds 32 bits");
    const uint64_t row_bytes = static_cast<uint64_t>(p.dim) * ElementBytes(p.type);
    Require(static_cast<uint64_t>(p.heads) * row_bytes <= kMaxWord &&
                static_cast<uint64_t>(p.tokens) * kStatBytes <= kMaxWord,
            "a stride of ", p.heads, " heads of ", p.dim, " elements or of ", p.tokens, " statistics exceeds 32 bits");
}

// Returns the token rows that the intervals cover.
int64_t CheckIntervals(const MergeProblem& p)
{
    int64_t last = 0;
    int64_t rows = 0;
    for (size_t i = 0; i < p.intervals.size(); ++i) {
        const auto [begin, end] = p.intervals[i];
        Require(begin >= last && end >= begin && end <= p.tokens, "row interval ", i, " [", begin, ", ", end,
                ") must be ascending, disjoint and within the ", p.tokens, " rows");
        last = end;
        rows += end - begin;
    }
    return rows;
}

}  // namespace

uint64_t TileBytes(const TileSize& tile, ElementType type)
{
    const uint64_t cells = static_cast<uint64_t>(tile.rows) * tile.cols;
    const uint64_t stats = static_cast<uint64_t>(tile.rows) * kStatBytes;
    const uint64_t queues = 2 * (4 * stats + 2 * stats + 3 * cells * ElementBytes(type));
    const uint64_t wide = type == ElementType::kFloat ? 0 : 2 * cells * 4;
    return queues + 2 * stats + wide;
}

TileSize ChooseTile(uint32_t dim, ElementType type, uint64_t rows_per_core)
{
    const uint32_t chunks = (dim + kMaxTileCols - 1) / kMaxTileCols;
    const uint32_t even = (dim + chunks - 1) / chunks;
    const uint32_t cols = (even + kColumnStep - 1) / kColumnStep * kColumnStep;
    const uint64_t fit = kUbBudget / TileBytes({1, cols}, type);
    // Two tiles per core at least, so that copies have arithmetic to hide behind.
    const uint64_t half_share = (rows_per_core + 1) / 2;
    const uint64_t rows = std::min({fit, static_cast<uint64_t>(kMaxTileRows), std::max<uint64_t>(half_share, 1)});
    return {static_cast<uint32_t>(rows), cols};
}

std::vector<uint32_t> MakeTable(const MergeProblem& problem)
{
    CheckShape(problem);
    const int64_t part_rows = CheckIntervals(problem);
    Segments segments(problem.ntd ? problem.segments : std::vector<int64_t>{problem.tokens}, problem.tokens,
                      "segments");
    Segments part_segments(problem.part_ntd ? problem.part_segments : std::vector<int64_t>{part_rows}, part_rows,
                           "part_segments");
    TableBuilder builder(problem);
    int64_t part_row = 0;
    for (size_t i = 0; i < problem.intervals.size();) {
        int64_t row = problem.intervals[i].first;
        int64_t end = problem.intervals[i].second;
        for (++i; i < problem.intervals.size() && problem.intervals[i].first == end; ++i) {
            end = problem.intervals[i].second;
        }
        while (row < end) {
            segments.Seek(row);
            part_segments.Seek(part_row);
            const int64_t count = std::min({end - row, segments.end() - row, part_segments.end() - part_row});
            builder.Add(row, part_row, count, &segments, &part_segments);
            row += count;
            part_row += count;
        }
    }
    return builder.Finish(part_rows);
}

}  // namespace pa_npu
