// Loops of kernels.py over rows, which numpy needs many passes or sorts for. Every result is that of the numpy code
// beside its caller, to the last bit: the same operations on the same numbers in the same order.
//
// Arrays are contiguous. Nothing here allocates for its caller, throws, or keeps a pointer.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

namespace {

using Int = std::int64_t;
using Byte = std::uint8_t;

constexpr Int NEVER_NS = std::numeric_limits<Int>::min();
constexpr Int NUM_KINDS = 256;
constexpr int OK = 0, OUT_OF_MEMORY = 1;

template <typename Work>
int guarded(Work work) {
    try {
        work();
    } catch (const std::bad_alloc&) {
        return OUT_OF_MEMORY;
    }
    return OK;
}

// Half the sum of the values at two places of `values` once they were in order.
double middle(double* values, Int count, Int low, Int high) {
    std::nth_element(values, values + low, values + count);
    double first = values[low];
    double second = high == low ? first : *std::min_element(values + low + 1, values + count);
    return (first + second) / 2;
}

// As np.rint and a cast to int64.
Int whole(double value) { return static_cast<Int>(std::rint(value)); }

// What `operation_roles` says of a row, in bits.
constexpr Byte SIDE = 1, OTHER_SIDE = 2, DEPENDS = 4, SYNCHRONISES = 8, SENDER = 16, FROM_ROOT = 32;

// Where the last enter is that a row waits for, of those of both sides of each operation, as `awaited`.
Int awaited(Byte role, Int instance, Int exit, Int blocked, const std::vector<Int>& last_ns) {
    const Int other = 2 * instance + !!(role & OTHER_SIDE);
    if (!(role & FROM_ROOT)) return other;
    const Int later = 2 * instance + (last_ns[2 * instance + 1] > last_ns[2 * instance]);
    return exit >= last_ns[later] && exit - blocked <= last_ns[later] ? later : other;
}

// How many of some ascending times are no later than another one: mostly as many as of the one before.
struct Counted {
    Int count;
    const Int* times;
    Int found = 0;

    Int operator()(Int time) {
        if (found < count && times[found] <= time) {
            ++found;
        } else if (!found || times[found - 1] <= time) {
            return found;
        }
        if ((found < count && times[found] <= time) || (found && times[found - 1] > time))
            found = std::upper_bound(times, times + count, time) - times;
        return found;
    }
};

constexpr Int BLOCK_ROWS = 1 << 13;

// The rows of all ranks in order of rank and enter.
struct Timeline {
    Int num_slices;
    const Int* bounds;
    const Int* order;
    const Int* step;
    std::vector<std::int32_t> place, slice;  // of each row
};

// Consecutive places of each rank, with whole steps: those of about as many rows as wanted, or all.
struct Blocks {
    const Timeline& line;
    Int rows_of_rank;
    std::vector<Int> first, stop;

    Blocks(const Timeline& of, Int most_rows)
        : line(of), rows_of_rank(std::max<Int>(most_rows / std::max<Int>(of.num_slices, 1), 1)),
          first(of.num_slices), stop(of.bounds, of.bounds + of.num_slices) {
        for (Int slice = 0; slice < of.num_slices; ++slice)
            for (Int at = of.bounds[slice] + 1; at < of.bounds[slice + 1]; ++at)
                if (of.step[of.order[at]] < of.step[of.order[at - 1]]) {
                    rows_of_rank = of.bounds[of.num_slices];  // steps in no order: all at once
                    return;
                }
    }

    bool next() {
        first = stop;
        Int last = std::numeric_limits<Int>::max();
        bool is_left = false;
        for (Int slice = 0; slice < line.num_slices; ++slice) {
            const Int end = line.bounds[slice + 1];
            if (first[slice] == end) continue;
            is_left = true;
            last = std::min(last, line.step[line.order[std::min(first[slice] + rows_of_rank, end) - 1]]);
        }
        const bool takes_all = rows_of_rank >= line.bounds[line.num_slices];
        for (Int slice = 0; slice < line.num_slices; ++slice) {
            const Int end = line.bounds[slice + 1];
            if (takes_all) stop[slice] = end;
            while (stop[slice] < end && line.step[line.order[stop[slice]]] <= last) ++stop[slice];
        }
        return is_left;
    }
};

struct Delays {
    const Int* slot;
    Int num_groups;
    const std::int32_t* groups;
    const std::int32_t* meets_in;
    const Int* partner;
    const Int* wait_ns;
    const Byte* mask;
    Int width, most_rounds, least_passed_ns;
    double rate_unit, most_rate;
};

// Delays followed back through the rows of one block after the other.
class Origins {
  public:
    Origins(const Timeline& line, const Delays& delays) : line_(line), in_(delays), of_round_(delays.width) {}

    // Return the number of rounds; -1 where a row depends on one outside of the block.
    Int add(const Blocks& blocks, double* found, double* waited) {
        place(blocks);
        if (!collect(blocks, waited)) return -1;
        Int count = 0;
        bool is_active = std::any_of(waits_.begin(), waits_.end(), [](const Wait& wait) { return wait.mass != 0; });
        for (; is_active && count < in_.most_rounds; ++count) is_active = pass_on(found + (count ? in_.width : 0));
        std::fill(of_round_.begin(), of_round_.end(), 0.0);
        for (const Wait& wait : waits_) of_round_[wait.cause] += static_cast<double>(wait.mass);
        for (Int rank = 0; rank < in_.width; ++rank) found[in_.width + rank] += of_round_[rank];
        return count;
    }

  private:
    struct Wait {
        std::int32_t place, partner_place, first_other, cause;
        Int wait, mass;
        double share, other;
    };

    // Number the places of a block, sum up its waits, and note where steps begin and ranks last met in their groups.
    void place(const Blocks& blocks) {
        base_.assign(line_.num_slices + 1, 0);
        for (Int slice = 0; slice < line_.num_slices; ++slice)
            base_[slice + 1] = base_[slice] + blocks.stop[slice] - blocks.first[slice];
        num_places_ = base_[line_.num_slices];
        total_.resize(num_places_ + 1);
        begin_.resize(num_places_);
        behind_.resize(num_places_ * in_.num_groups);
        total_[0] = 0;
        for (Int slice = 0; slice < line_.num_slices; ++slice) {
            const Int* rows = line_.order + blocks.first[slice];
            const Int count = blocks.stop[slice] - blocks.first[slice], base = base_[slice];
            std::int32_t first = static_cast<std::int32_t>(base);
            for (Int at = 0; at < count; ++at) {
                const Int row = rows[at];
                total_[base + at + 1] = total_[base + at] + (in_.partner[row] >= 0 ? in_.wait_ns[row] : 0);
                if (at && line_.step[row] != line_.step[rows[at - 1]]) first = static_cast<std::int32_t>(base + at);
                begin_[base + at] = first;
            }
            for (Int number = 0; number < in_.num_groups; ++number) {
                const std::int32_t group = in_.groups[number * line_.num_slices + slice];
                std::int32_t last = 0;
                for (Int at = 0; at < count; ++at) {
                    behind_[(base + at) * in_.num_groups + number] = last;
                    if (group >= 0 && in_.meets_in[rows[at]] == group) last = static_cast<std::int32_t>(base + at + 1);
                }
            }
        }
    }

    bool collect(const Blocks& blocks, double* waited) {
        waits_.clear();
        for (Int slice = 0; slice < line_.num_slices; ++slice)
            for (Int at = blocks.first[slice]; at < blocks.stop[slice]; ++at) {
                const Int row = line_.order[at], partner = in_.partner[row], wait = in_.wait_ns[row];
                if (partner < 0 || wait <= 0) continue;
                const Int other_slice = line_.slice[partner], other_at = line_.place[partner];
                if (other_at < blocks.first[other_slice] || other_at >= blocks.stop[other_slice]) return false;
                const Int mass = in_.mask[row] ? wait : 0;
                waited[in_.slot[slice]] += static_cast<double>(mass);
                const Int own_place = base_[slice] + at - blocks.first[slice];
                const Int other_place = base_[other_slice] + other_at - blocks.first[other_slice];
                std::int32_t first_own = begin_[own_place], first_other = begin_[other_place];
                since_common(slice, other_slice, own_place, other_place, first_own, first_other);
                const Int own = total_[own_place] - total_[first_own];
                const Int other = total_[other_place] - total_[first_other];
                const Int passed = std::min(std::max(other - own, Int{0}), wait);
                waits_.push_back({
                    static_cast<std::int32_t>(own_place), static_cast<std::int32_t>(other_place), first_other,
                    static_cast<std::int32_t>(in_.slot[other_slice]), wait, mass,
                    static_cast<double>(passed) / static_cast<double>(wait), static_cast<double>(std::max(other, Int{1}))
                });
            }
        return true;
    }

    void since_common(
        Int slice, Int other_slice, Int own_place, Int other_place, std::int32_t& first_own, std::int32_t& first_other
    ) const {
        for (Int number = 0; number < in_.num_groups; ++number) {
            const std::int32_t group = in_.groups[number * line_.num_slices + slice];
            if (group < 0) continue;
            for (Int other = 0; other < in_.num_groups; ++other)
                if (in_.groups[other * line_.num_slices + other_slice] == group) {
                    first_own = std::max(first_own, behind_[own_place * in_.num_groups + number]);
                    first_other = std::max(first_other, behind_[other_place * in_.num_groups + other]);
                }
        }
    }

    bool pass_on(double* found) {
        change_.assign(num_places_ + 1, 0);
        std::fill(of_round_.begin(), of_round_.end(), 0.0);
        for (const Wait& wait : waits_) {
            if (!wait.mass) continue;
            Int passed = whole(static_cast<double>(wait.mass) * wait.share);
            if (passed < in_.least_passed_ns) passed = 0;
            of_round_[wait.cause] += static_cast<double>(wait.mass - passed);
            const double rate = std::rint(static_cast<double>(passed) / wait.other * in_.rate_unit);
            const auto whole_rate = static_cast<std::uint64_t>(whole(std::min(rate, in_.most_rate)));
            change_[wait.first_other] += whole_rate;
            change_[wait.partner_place] -= whole_rate;
        }
        for (Int rank = 0; rank < in_.width; ++rank) found[rank] += of_round_[rank];
        for (Int at = 1; at <= num_places_; ++at) change_[at] += change_[at - 1];
        bool is_active = false;
        for (Wait& wait : waits_) {
            const double covered = static_cast<double>(static_cast<Int>(change_[wait.place]));
            wait.mass = whole(covered * (static_cast<double>(wait.wait) / in_.rate_unit));
            is_active |= wait.mass != 0;
        }
        return is_active;
    }

    const Timeline& line_;
    const Delays& in_;
    Int num_places_ = 0;
    std::vector<Int> base_, total_;
    std::vector<std::int32_t> begin_, behind_;
    std::vector<std::uint64_t> change_;
    std::vector<Wait> waits_;
    std::vector<double> of_round_;
};

struct Stretch {
    Int begin, end;
};

// Time before an edge that stretches cover, which are ascending and disjoint. Edges ascend.
class CoveredBefore {
  public:
    explicit CoveredBefore(const std::vector<Stretch>& stretches) : stretches_(stretches) {}

    Int operator()(Int edge) {
        while (at_ < stretches_.size() && stretches_[at_].end <= edge) {
            total_ += stretches_[at_].end - stretches_[at_].begin;
            ++at_;
        }
        return total_ + (at_ < stretches_.size() ? std::max(edge - stretches_[at_].begin, Int{0}) : 0);
    }

  private:
    const std::vector<Stretch>& stretches_;
    std::size_t at_ = 0;
    Int total_ = 0;
};

void sort_edges(std::vector<Int>& edges) {
    std::sort(edges.begin(), edges.end());
    edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
}

// The interval that began last of those that cover each segment between edges, -1 for none: as `innermost`.
std::vector<Int> innermost(Int count, const Int* begin, const Int* end, const std::vector<Int>& edges) {
    std::vector<Int> order;
    for (Int at = 0; at < count; ++at)
        if (end[at] > begin[at]) order.push_back(at);
    std::sort(order.begin(), order.end(), [&](Int left, Int right) {
        if (begin[left] != begin[right]) return begin[left] < begin[right];
        if (end[left] != end[right]) return end[left] > end[right];
        return left < right;
    });
    std::vector<Int> cover(edges.empty() ? 0 : edges.size() - 1, -1), open;  // open: a heap of places in `order`
    std::size_t next = 0;
    for (std::size_t segment = 0; segment < cover.size(); ++segment) {
        for (; next < order.size() && begin[order[next]] <= edges[segment]; ++next) {
            open.push_back(static_cast<Int>(next));
            std::push_heap(open.begin(), open.end());
        }
        while (!open.empty() && end[order[open.front()]] <= edges[segment]) {
            std::pop_heap(open.begin(), open.end());
            open.pop_back();
        }
        if (!open.empty()) cover[segment] = order[open.front()];
    }
    return cover;
}

// What is under way in some segments, ascending: stretches that any of two times of each operation cover, joined.
std::vector<Stretch> covered_near(
    Int count, const Int* enter, const Int* exit, const Int* blocked, const Int* wait, const std::vector<Stretch>& segments
) {
    std::vector<Stretch> found;
    std::size_t near = 0;
    const auto touches = [&](Int begin, Int end) {
        while (near < segments.size() && segments[near].end <= begin) ++near;
        while (near > 0 && segments[near - 1].end > begin) --near;
        return near < segments.size() && segments[near].begin < end;
    };
    for (Int row = 0; row < count; ++row) {
        if (!touches(enter[row], std::max(enter[row] + wait[row], exit[row]))) continue;
        const Int block = std::max(enter[row], exit[row] - blocked[row]);
        for (const Stretch& own : {Stretch{enter[row], enter[row] + wait[row]}, Stretch{block, exit[row]}})
            if (own.end > own.begin) found.push_back(own);
    }
    std::sort(found.begin(), found.end(), [](const Stretch& left, const Stretch& right) {
        return left.begin < right.begin;
    });
    std::size_t kept = 0;
    for (const Stretch& own : found)
        if (kept && own.begin <= found[kept - 1].end)
            found[kept - 1].end = std::max(found[kept - 1].end, own.end);
        else
            found[kept++] = own;
    found.resize(kept);
    return found;
}

}  // namespace

extern "C" {

std::uint32_t source_check() { return SOURCE_CHECK; }

// The positions of numbers from 0 to `most`, in their order, equal ones in that of their positions.
int count_order(Int num_values, const Int* number, Int most, Int* order) {
    return guarded([&] {
        std::vector<Int> place(static_cast<std::size_t>(most) + 2, 0);
        for (Int at = 0; at < num_values; ++at) ++place[number[at] + 1];
        for (Int value = 0; value <= most; ++value) place[value + 1] += place[value];
        for (Int at = 0; at < num_values; ++at) order[place[number[at]]++] = at;
    });
}

// For each value of (num_rows, num_columns) the median of the others of its column, at least two rows.
int others_median(Int num_rows, Int num_columns, const double* values, double* medians) {
    return guarded([&] {
        constexpr Int WIDTH = 8;  // columns that share the lines of the cache
        const Int low = (num_rows - 2) / 2, high = (num_rows - 1) / 2;
        std::vector<double> columns(static_cast<std::size_t>(num_rows * WIDTH));
        for (Int first = 0; first < num_columns; first += WIDTH) {
            const Int width = std::min(WIDTH, num_columns - first);
            for (Int row = 0; row < num_rows; ++row)
                for (Int at = 0; at < width; ++at)
                    columns[at * num_rows + row] = values[row * num_columns + first + at];
            double below[WIDTH], above[WIDTH], below_next[WIDTH], above_next[WIDTH];
            for (Int at = 0; at < width; ++at) {
                double* column = columns.data() + at * num_rows;
                std::nth_element(column, column + low, column + num_rows);
                below[at] = column[low];
                std::nth_element(column + low + 1, column + low + 1, column + num_rows);
                below_next[at] = column[low + 1];
                above[at] = column[high];
                above_next[at] = high == low ? below_next[at] : *std::min_element(column + high + 1, column + num_rows);
            }
            for (Int row = 0; row < num_rows; ++row)
                for (Int at = 0; at < width; ++at) {
                    const double value = values[row * num_columns + first + at];
                    const double under = value <= below[at] ? below_next[at] : below[at];
                    const double over = value <= above[at] ? above_next[at] : above[at];
                    medians[row * num_columns + first + at] = (under + over) / 2;
                }
        }
    });
}

// The median of each group of values, which are in order of their groups; 0 of one without values.
int medians_of_groups(Int num_groups, const Int* bounds, double* values, double* medians) {
    return guarded([&] {
        for (Int group = 0; group < num_groups; ++group) {
            const Int count = bounds[group + 1] - bounds[group];
            medians[group] = count ? middle(values + bounds[group], count, (count - 1) / 2, count / 2) : 0.0;
        }
    });
}

// What nodes take, (num_nodes, num_steps), and the longest paths to them: value = largest value of the predecessors +
// weight. A node of which `where` is not -1 has its weights in that row of `replaced`. `targets` are in an order in which
// predecessors go before; those of each are `sources[firsts[at]]` to `sources[firsts[at + 1]]`. Of `values` and
// `ended`, (num_ends, num_steps), the values of `ends`, each may be null.
int replay(
    Int num_nodes, Int num_steps, const double* weight, const Int* where, const double* replaced, Int num_targets,
    const Int* targets, const Int* firsts, const Int* sources, Int num_ends, const Int* ends, double* values, double* ended
) {
    return guarded([&] {
        constexpr Int WIDTH = 16;  // steps at once, so that all their values stay in the cache
        std::vector<double> value(static_cast<std::size_t>(num_nodes) * WIDTH);
        for (Int first = 0; first < num_steps; first += WIDTH) {
            const Int width = std::min(WIDTH, num_steps - first);
            for (Int node = 0; node < num_nodes; ++node) {
                const double* row = where[node] < 0 ? weight + node * num_steps : replaced + where[node] * num_steps;
                std::copy_n(row + first, width, value.data() + node * WIDTH);
            }
            for (Int at = 0; at < num_targets; ++at) {
                double latest[WIDTH];
                std::copy_n(value.data() + sources[firsts[at]] * WIDTH, WIDTH, latest);
                for (Int edge = firsts[at] + 1; edge < firsts[at + 1]; ++edge) {
                    const double* other = value.data() + sources[edge] * WIDTH;
                    for (Int step = 0; step < WIDTH; ++step)
                        latest[step] = latest[step] > other[step] ? latest[step] : other[step];
                }
                double* own = value.data() + targets[at] * WIDTH;
                for (Int step = 0; step < WIDTH; ++step) own[step] += latest[step];
            }
            if (values)
                for (Int node = 0; node < num_nodes; ++node)
                    std::copy_n(value.data() + node * WIDTH, width, values + node * num_steps + first);
            if (ended)
                for (Int at = 0; at < num_ends; ++at)
                    std::copy_n(value.data() + ends[at] * WIDTH, width, ended + at * num_steps + first);
        }
    });
}

// The row of the last partner to enter that each row depends on, -1 for none. `roles` are those of `operation_roles`:
// of each operation, not as its root and as its root.
int last_partner(
    Int num_rows, Int num_instances, const Byte* op, const Int* rank, const Int* peer, const Int* instance,
    const Int* enter_ns, const Int* exit_ns, const Int* blocked_ns, const Byte* is_matched, const Byte* roles,
    Int* partner
) {
    return guarded([&] {
        std::vector<Int> last_ns(2 * num_instances, NEVER_NS), last(2 * num_instances, -1);
        const auto role_of = [&](Int row) { return roles[2 * op[row] + (rank[row] == peer[row])]; };
        for (Int row = 0; row < num_rows; ++row) {
            const Int side = 2 * instance[row] + (role_of(row) & SIDE);
            if (!is_matched[row] || enter_ns[row] < last_ns[side]) continue;
            last_ns[side] = enter_ns[row];
            last[side] = row;
        }
        for (Int row = 0; row < num_rows; ++row) {
            partner[row] = -1;
            const Byte role = role_of(row);
            const Int other = awaited(role, instance[row], exit_ns[row], blocked_ns[row], last_ns);
            if (is_matched[row] && role & DEPENDS && last_ns[other] > enter_ns[row]) partner[row] = last[other];
        }
    });
}

// The group in which each row meets all of its group, -1 for none, and which groups that happens in. `roles` are as in
// `waits`, `size` is by group.
void met_groups(
    Int num_rows, const Byte* op, const Byte* is_matched, const Int* group, const Byte* roles, const Int* size,
    std::int32_t* meets_in, Byte* is_used
) {
    for (Int row = 0; row < num_rows; ++row) {
        const bool meets = is_matched[row] && (roles[2 * op[row]] & SYNCHRONISES) && group[row] >= 0 && size[group[row]] > 1;
        meets_in[row] = meets ? static_cast<std::int32_t>(group[row]) : -1;
        if (meets) is_used[group[row]] = 1;
    }
}

// Waiting that each rank caused, `found` of (2, num_ranks + 1), directly and passed on, and how long each waited,
// `waited` of (num_ranks + 1,). Rows of a rank are `bounds[slice]` to `bounds[slice + 1]`; `order` lists them by enter,
// `slot` says which rank that is, and `groups`, (num_groups, num_slices), in which groups it meets others. Returns the
// number of rounds, or -1 without memory.
Int delay_origins(
    Int num_rows, Int num_slices, const Int* bounds, const Int* order, const Int* step, const Int* slot, Int num_groups,
    const std::int32_t* groups, const std::int32_t* meets_in, const Int* partner, const Int* wait_ns, const Byte* mask,
    Int num_ranks, Int most_rounds, Int least_passed_ns, double rate_unit, double most_rate, double* found,
    double* waited
) try {
    Timeline line{num_slices, bounds, order, step, std::vector<std::int32_t>(num_rows), std::vector<std::int32_t>(num_rows)};
    for (Int slice = 0; slice < num_slices; ++slice)
        for (Int at = bounds[slice]; at < bounds[slice + 1]; ++at) {
            line.place[order[at]] = static_cast<std::int32_t>(at);
            line.slice[order[at]] = static_cast<std::int32_t>(slice);
        }
    const Delays delays{slot, num_groups, groups, meets_in, partner, wait_ns, mask, num_ranks + 1, most_rounds,
                        least_passed_ns, rate_unit, most_rate};
    Origins origins(line, delays);
    // Steps are taken a few at a time, whose rows stay in the cache. Where delays go on into other steps, all are.
    for (const Int most_rows : {BLOCK_ROWS, num_rows}) {
        std::fill_n(found, 2 * delays.width, 0.0);
        std::fill_n(waited, delays.width, 0.0);
        Int most = 0;
        bool is_done = true;
        Blocks blocks(line, most_rows);
        while (is_done && blocks.next()) {
            const Int count = origins.add(blocks, found, waited);
            is_done = count >= 0;
            most = std::max(most, count);
        }
        if (is_done) return most;
    }
    return -1;
} catch (const std::bad_alloc&) {
    return -1;
}

// The rows of each rank in each step: of (num_ranks, num_steps) the first one and the one behind the last, of rows
// `bounds[slice]` to `bounds[slice + 1]` of the ranks `rank_of` (-1 for none). Returns how many rows those are together.
Int rows_of_steps(
    Int num_slices, const Int* bounds, const Int* rank_of, const Int* row_step, Int num_ranks, Int num_steps,
    const Int* step, Int* first, Int* stop
) {
    std::fill_n(first, num_ranks * num_steps, 0);
    std::fill_n(stop, num_ranks * num_steps, 0);
    for (Int slice = 0; slice < num_slices; ++slice) {
        if (rank_of[slice] < 0) continue;
        Int* const own_first = first + rank_of[slice] * num_steps;
        Int* const own_stop = stop + rank_of[slice] * num_steps;
        Int column = 0;
        for (Int row = bounds[slice]; row < bounds[slice + 1]; ++row) {
            if (column == num_steps || step[column] != row_step[row])
                column = std::lower_bound(step, step + num_steps, row_step[row]) - step;
            if (column == num_steps || step[column] != row_step[row]) continue;
            if (own_stop[column] == 0) own_first[column] = row;
            own_stop[column] = row + 1;
        }
    }
    double total = 0;
    for (Int at = 0; at < num_ranks * num_steps; ++at) total += static_cast<double>(stop[at] - first[at]);
    return whole(std::min(total, 9e18));
}

// The last wait of a rank in a step that ends by a time, for each lookup, and whether there is one. Waits are in order
// of their ends, as far as `most_inside_ns` into the step, then of their rows; the one looked for comes before the wait
// `before`, if that is a row that ends one. `first` and `stop` are of `rows_of_steps`; rows of a rank that end between
// `block_begin_ns` and `block_end_ns`, `block_bounds[rank]` to `block_bounds[rank + 1]`, end a wait, too.
void last_waits(
    Int num_lookups, const Int* rank, const Int* column, const Int* time_ns, const Int* before, Int num_steps,
    const Int* step, const Int* begin_ns, const Int* first, const Int* stop, const Int* row_step, const Int* exit_ns,
    const Byte* is_known, const Byte* is_blocking, const Int* block_bounds, const Int* block_begin_ns,
    const Int* block_end_ns, Int most_inside_ns, Int* found, Byte* has_found
) {
    for (Int at = 0; at < num_lookups; ++at) {
        const Int cell = rank[at] * num_steps + column[at], own_step = step[column[at]], origin_ns = begin_ns[cell];
        const Int* const blocks_begin = block_begin_ns + block_bounds[rank[at]];
        const Int* const blocks_end = block_begin_ns + block_bounds[rank[at] + 1];
        const auto inside = [&](Int when_ns) { return std::clamp(when_ns - origin_ns, Int{0}, most_inside_ns); };
        const auto is_wait = [&](Int row) {
            if (!is_known[row]) return false;
            if (is_blocking[row]) return true;
            const Int* block = std::upper_bound(blocks_begin, blocks_end, exit_ns[row]);
            return block != blocks_begin && exit_ns[row] <= block_end_ns[block - 1 - block_begin_ns];
        };
        Int last_ns = inside(time_ns[at]), last_row = std::numeric_limits<Int>::max(), best = -1, best_ns = -1;
        if (before[at] >= 0 && is_wait(before[at])) {
            const Int other_step = row_step[before[at]];
            if (other_step < own_step) last_ns = -1;
            if (other_step == own_step && inside(exit_ns[before[at]]) <= last_ns) {
                last_ns = inside(exit_ns[before[at]]);
                last_row = before[at] - 1;
            }
        }
        for (Int row = first[cell]; row < stop[cell]; ++row) {
            if (row_step[row] != own_step) continue;
            const Int ends_ns = inside(exit_ns[row]);
            if (ends_ns < best_ns || ends_ns > last_ns || (ends_ns == last_ns && row > last_row)) continue;
            if (!is_wait(row)) continue;
            best = row;
            best_ns = ends_ns;
        }
        found[at] = std::max(best, Int{0});
        has_found[at] = best >= 0;
    }
}

// Nanoseconds of each part of each step of one rank, (num_steps, num_parts), as `parts_of_steps`. `order` lists the
// steps by their begins, `parts` is of (phase or none, state): free, waiting and transferring. Where blocked calls
// overlap, nothing is measured, and the result is 2.
int parts_of_steps(
    Int num_steps, const Int* step_begin, const Int* step_end, const Int* order, Int num_phases, const Byte* phase,
    const Int* phase_begin, const Int* phase_end, Int num_rows, const Int* enter, const Int* exit, const Int* blocked,
    const Int* wait, Int no_phase, Int in_torch, Int num_parts, const Int* parts, double* total
) {
    constexpr int OVERLAPS = 2;
    int status = OK;
    const int failed = guarded([&] {
        std::vector<Stretch> waits, transfers;
        Int last = NEVER_NS;
        for (Int row = 0; row < num_rows; ++row) {
            if (blocked[row] <= 0 || exit[row] <= enter[row]) continue;
            const Int begin = std::max(enter[row], exit[row] - blocked[row]);
            if (begin < last) {
                status = OVERLAPS;
                return;
            }
            last = exit[row];
            const Int middle = std::min(std::max(enter[row] + wait[row], begin), exit[row]);
            waits.push_back({begin, middle});
            transfers.push_back({middle, exit[row]});
        }
        std::vector<Int> edges;
        edges.reserve(2 * (num_steps + num_phases));
        edges.insert(edges.end(), step_begin, step_begin + num_steps);
        edges.insert(edges.end(), step_end, step_end + num_steps);
        edges.insert(edges.end(), phase_begin, phase_begin + num_phases);
        edges.insert(edges.end(), phase_end, phase_end + num_phases);
        sort_edges(edges);
        const std::vector<Int> cover = innermost(num_phases, phase_begin, phase_end, edges);
        std::vector<Int> of_segment(cover.size());
        std::vector<Stretch> torch;
        for (std::size_t segment = 0; segment < cover.size(); ++segment) {
            of_segment[segment] = cover[segment] < 0 ? no_phase : std::min<Int>(phase[cover[segment]], no_phase);
            if (of_segment[segment] == in_torch) torch.push_back({edges[segment], edges[segment + 1]});
        }
        std::vector<Stretch> busy;
        if (!torch.empty()) busy = covered_near(num_rows, enter, exit, blocked, wait, torch);
        CoveredBefore waited(waits), transferred(transfers), covered(busy);
        Int step = -1;
        for (std::size_t segment = 0; segment < cover.size(); ++segment) {
            const Int begin = edges[segment], end = edges[segment + 1];
            Int transfer_ns = -transferred(begin), wait_ns = -waited(begin);
            transfer_ns += transferred(end);
            wait_ns += waited(end);
            if (of_segment[segment] == in_torch) {
                wait_ns = -covered(begin) - transfer_ns;
                wait_ns += covered(end);
            }
            while (step + 1 < num_steps && step_begin[order[step + 1]] <= begin) ++step;
            if (step < 0 || begin >= step_end[order[step]]) continue;
            double* of_step = total + order[step] * num_parts;
            const Int* part = parts + of_segment[segment] * 3;
            of_step[part[0]] += static_cast<double>(end - begin - wait_ns - transfer_ns);
            of_step[part[1]] += static_cast<double>(wait_ns);
            of_step[part[2]] += static_cast<double>(transfer_ns);
        }
    });
    return failed ? failed : status;
}

// How long any operation of a rank was under way in each step, as `under_way_ns`; operations are in order of `enter`.
int under_way(
    Int num_rows, const Int* enter, const Int* exit, Int num_steps, const Int* step_begin, const Int* step_end,
    double* total
) {
    return guarded([&] {
        std::vector<Int> until(num_rows), before(num_rows + 1, 0);
        Int last = num_rows ? enter[0] : 0;
        for (Int row = 0; row < num_rows; ++row) {
            until[row] = row ? std::max(until[row - 1], exit[row]) : exit[row];
            before[row + 1] = before[row] + std::max(until[row] - std::max(enter[row], last), Int{0});
            last = until[row];
        }
        const auto until_time = [&](Int time) {
            const Int count = std::upper_bound(enter, enter + num_rows, time) - enter;
            return count ? before[count] - std::max(until[count - 1] - time, Int{0}) : Int{0};
        };
        for (Int step = 0; step < num_steps; ++step)
            total[step] = static_cast<double>(std::max(until_time(step_end[step]) - until_time(step_begin[step]), Int{0}));
    });
}

// How much of some stretches, ascending and disjoint, lies before each time, as `CoveredTime.until_ns`.
int covered_until(Int num_stretches, const Int* begin, const Int* end, Int num_times, const Int* times, Int* covered) {
    return guarded([&] {
        std::vector<Int> before(num_stretches + 1, 0);
        for (Int at = 0; at < num_stretches; ++at) before[at + 1] = before[at] + end[at] - begin[at];
        Counted begun{num_stretches, begin};
        for (Int at = 0; at < num_times; ++at) {
            const Int count = begun(times[at]);
            covered[at] = before[count] - (count ? std::max(end[count - 1] - times[at], Int{0}) : 0);
        }
    });
}

// Times on the reference clock, as `reference_times`; `rates` are those between samples, of which there are two or more.
void reference_times(
    Int num_samples, const Int* local, const Int* offset, const double* rates, double most_ns, Int num_times,
    const Int* times, Int* reference
) {
    Counted passed{num_samples - 2, local + 1};
    for (Int at = 0; at < num_times; ++at) {
        const Int segment = passed(times[at]);
        const double change = static_cast<double>(times[at] - local[segment]) * rates[segment];
        reference[at] = times[at] - (whole(std::clamp(change, -most_ns, most_ns)) + offset[segment]);
    }
}

// When ranks began to wait for slots, (num_waits, num_steps), as `_wait_begins`: no earlier than `begin`, which is
// changed, and than the rank's last enter before the exit. Slots of the rank are `first[wait]` to `stop[wait]`.
void wait_begins(
    Int num_waits, Int num_steps, const Int* first, const Int* stop, const Int* enter, const Int* exit, Int* begin
) {
    for (Int wait = 0; wait < num_waits; ++wait) {
        const Int* const until = exit + wait * num_steps;
        Int* const own = begin + wait * num_steps;
        for (Int slot = first[wait]; slot < stop[wait]; ++slot) {
            const Int* const entered = enter + slot * num_steps;
            for (Int step = 0; step < num_steps; ++step) {
                const Int last = entered[step] < until[step] ? entered[step] : own[step];
                own[step] = own[step] > last ? own[step] : last;
            }
        }
    }
}

// Wait, transfer and contradiction of each row, as `waits`. `roles` are those of `operation_roles`; `observed` is the
// kind of an exit that was seen, `failed` that of an error.
int waits(
    Int num_slices, const Int* bounds, Int num_groups, Int num_instances, const Byte* op, const Int* rank,
    const Int* peer, const Int* group, const Int* instance, const Int* enter, const Int* exit, const Int* blocked,
    const Byte* exit_kind, const Byte* is_matched, const Byte* roles, Int observed, Int failed, double overtaking_share,
    Int* wait_ns, Int* transfer_ns, Int* negative_ns, Byte* may_contradict
) {
    return guarded([&] {
        std::vector<Int> last_ns(2 * num_instances, NEVER_NS), order, of_kinds, latest(num_groups + 1);
        std::vector<Int> kinds(num_groups + 1);
        std::vector<Int> previous(num_groups + 1), since(num_groups + 1, -1), pairs(num_groups + 1), overtaking(num_groups + 1);
        const auto role_of = [&](Int row) { return roles[2 * op[row] + (rank[row] == peer[row])]; };
        std::vector<Byte> has_failed(num_instances, 0);
        for (Int row = 0; row < bounds[num_slices]; ++row) {
            Int& last = last_ns[2 * instance[row] + (role_of(row) & SIDE)];
            last = std::max(last, enter[row]);
            if (exit_kind[row] == failed) has_failed[instance[row]] = 1;
        }
        for (Int slice = 0; slice < num_slices; ++slice) {
            order.resize(bounds[slice + 1] - bounds[slice]);
            bool is_ascending = true;
            for (Int row = bounds[slice]; row < bounds[slice + 1]; ++row) {
                order[row - bounds[slice]] = row;
                is_ascending &= row == bounds[slice] || enter[row - 1] <= enter[row];
            }
            if (!is_ascending)
                std::stable_sort(order.begin(), order.end(), [&](Int left, Int right) { return enter[left] < enter[right]; });
            // Where kinds of operations overtake each other, each has a queue of its own in `of_kinds`.
            of_kinds.clear();
            for (const Int row : order) {
                const Int of = group[row] + 1;
                if (since[of] != slice) {
                    since[of] = slice;
                    pairs[of] = overtaking[of] = 0;
                    previous[of] = NEVER_NS;
                    kinds[of] = -1;
                } else if (op[latest[of]] != op[row]) {
                    ++pairs[of];
                    overtaking[of] += exit[row] < exit[latest[of]];
                }
                latest[of] = row;
            }
            for (const Int row : order) {
                const Byte role = role_of(row);
                const Int number = instance[row], of = group[row] + 1;
                const Int last = last_ns[awaited(role, number, exit[row], blocked[row], last_ns)];
                if (kinds[of] < 0 && overtaking[of] > overtaking_share * pairs[of]) {
                    kinds[of] = of_kinds.size();
                    of_kinds.resize(of_kinds.size() + NUM_KINDS, NEVER_NS);
                }
                Int& queue = kinds[of] < 0 ? previous[of] : of_kinds[kinds[of] + op[row]];
                const Int before = queue;
                queue = exit[row];
                bool depends = is_matched[row] && (role & DEPENDS);
                if (role & SENDER) depends &= exit[row] >= last && exit_kind[row] == observed;
                const Int released = has_failed[number] ? exit[row] : std::max(depends ? last : NEVER_NS, enter[row]);
                wait_ns[row] = std::min(released, exit[row]) - enter[row];
                transfer_ns[row] = is_matched[row] ? std::max(exit[row] - std::max(released, before), Int{0}) : 0;
                negative_ns[row] = 0;
                if (exit[row] < last && exit_kind[row] != failed) {
                    if (!(role & SENDER)) may_contradict[number] = 1;
                    if ((role & SYNCHRONISES) && is_matched[row]) negative_ns[row] = last - exit[row];
                }
            }
        }
    });
}

}  // extern "C"
