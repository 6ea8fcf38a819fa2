// The plan of plan.py, compiled: the same trips and server steps, bit for bit, some twenty times faster.
//
// plan.py, core/schedule.py and sim/clock.py say what happens and why; here is the same without objects. Who is in flight,
// since which version, is read off the table of trips, whose columns belong to Python and are written in place. Random
// numbers, staleness weights and whatever a user may define come from Python, by calling back.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <new>
#include <vector>

using i64 = std::int64_t;

enum { USED, DROPPED, LATE, FAILED, CANCELLED, UNUSED, IN_FLIGHT = 255 };      // trips.py
enum { ARRIVES, DROPS, TIMES_OUT, WAKES };                                      // clock.py
enum { REFILL, ARRIVALS, COHORT };                                              // starting rules
enum { CHOICE, DURATION, DROPOUT, MOMENT, GAP, STREAMS };                       // streams of random numbers
enum { REACHED, TRIPS, TIME, RAISED, HOPELESS, NOTHING, BAD_DURATION, NO_MEMORY, IN_VAIN };  // how a call ended
static const i64 BLOCK = 4096, TRIES = 64, NEVER = i64(1) << 62, SOON = 4;

// What both sides see; fastplan.py has the same structure.
struct Facts {
    i64 *client, *examples;
    double *start_time, *end_time;
    i64 *start_version, *end_version;
    double *weight;
    i64 *server_step;
    std::uint8_t *outcome;
    i64 *order;
    i64 capacity, started, ended;
    i64 version, in_flight, buffered, first, ended_at_step;
    double now;
    i64 draws, arrivals;
    double next_arrival, origin;
    i64 *buffer, *staleness;  // of the buffer being filled, then of the step just taken: [buffer_size]
    double *weights;
    i64 hopeless, arrivals_in_vain;
    double bad_duration;
    i64 bad_trip;
    // settings
    i64 rule, most, poisson, buffer_size, clients, limit, scaled;
    double rate, dropout, timeout, per_time;
    i64 *sizes;  // or null
    int (*draw)(i64 stream, i64 block, double* into);
    int (*ask_factor)(i64 client, double* into);
    int (*ask_weight)(i64 staleness, double* into);
    int (*ask_examples)(i64 client, double* into);  // or null
    int (*grow)();
};

struct End {
    double time;
    i64 trip;
    int ending;
    bool operator<(const End& o) const {
        return time != o.time ? time < o.time : trip != o.trip ? trip < o.trip : ending < o.ending;
    }
};

// The ends to come by the number of their bucket. Those of the next NEAR numbers lie in a ring, which is found at once
// however many there are; the few that come later, in a map.
struct Buckets {
    static const i64 NEAR = 4096;
    std::vector<End> ring[NEAR];
    std::uint64_t filled[NEAR / 64] = {};  // a bit for each place in the ring that holds something
    std::map<i64, std::vector<End>> later;

    void put(i64 n, i64 now, const End& end) {  // n > now, the number of the bucket at hand
        if (n - now >= NEAR) return later[n].push_back(end);
        i64 place = n % NEAR;
        ring[place].push_back(end);
        filled[place / 64] |= std::uint64_t(1) << place % 64;
    }

    // the first bucket after `now` into `ends`; its number, or -1 if there is none
    i64 take(i64 now, std::vector<End>& ends) {
        ends.clear();
        i64 n = after(now);
        if (!later.empty() && (n < 0 || later.begin()->first <= n)) {
            i64 first = later.begin()->first;
            ends.swap(later.begin()->second);
            later.erase(later.begin());
            if (first != n) return first;
            ends.insert(ends.end(), ring[n % NEAR].begin(), ring[n % NEAR].end());
            ring[n % NEAR].clear();
        } else if (n >= 0) {
            ends.swap(ring[n % NEAR]);  // and what was at hand before leaves its room there
        } else {
            return -1;
        }
        filled[n % NEAR / 64] &= ~(std::uint64_t(1) << n % NEAR % 64);
        return n;
    }

    i64 after(i64 now) const {  // the number of the next bucket in the ring, or -1
        for (i64 n = now + 1; n < now + NEAR; n += 64 - n % 64)
            if (std::uint64_t word = filled[n % NEAR / 64] >> n % 64) return n + __builtin_ctzll(word);
        return -1;
    }

    template <class F> void each(F f) const {  // in no particular order
        for (auto& bucket : ring) std::for_each(bucket.begin(), bucket.end(), f);
        for (auto& bucket : later) std::for_each(bucket.second.begin(), bucket.second.end(), f);
    }

    void clear() {
        for (auto& bucket : ring) bucket.clear();
        std::fill(filled, filled + NEAR / 64, 0);
        later.clear();
    }
};

struct Raised {};  // Python has raised an error while we asked it something

struct Stream {
    i64 first = -BLOCK;
    double block[BLOCK];
};

struct Plan {
    Facts& f;
    Stream streams[STREAMS];
    std::vector<double> weight_of;               // s(τ), NaN where it was not asked yet
    std::vector<std::uint64_t> busy;             // a bit per client
    i64 busy_count = 0;
    std::vector<i64> failed;                     // sorted
    Buckets buckets;
    std::vector<End> ends;                       // the bucket at hand, and what came before it since; sorted
    size_t position = 0;
    i64 number = -1;
    i64 in_vain = 0;  // wake-ups since anything happened

    explicit Plan(Facts& facts) : f(facts), busy(facts.clients / 64 + 1) {}

    double draw(int stream, i64 index) {
        Stream& s = streams[stream];
        i64 offset = index - s.first;
        if (offset < 0 || offset >= BLOCK) {
            i64 block = index / BLOCK;
            s.first = -BLOCK;
            if (f.draw(stream, block, s.block)) throw Raised();
            s.first = block * BLOCK;
            offset = index - s.first;
        }
        return s.block[offset];
    }

    bool is_busy(i64 client) const { return busy[client >> 6] >> (client & 63) & 1; }
    void set_busy(i64 client) { busy[client >> 6] |= std::uint64_t(1) << (client & 63), busy_count++; }
    void set_free(i64 client) { busy[client >> 6] &= ~(std::uint64_t(1) << (client & 63)), busy_count--; }

    // ── the clock ────────────────────────────────────────────────────────────────────────────────────────────────────

    void put(End end) {
        i64 n = i64(std::min(end.time * f.per_time, 9e18));
        if (n <= number) {
            if (position > 4096 && position > ends.size() / 2)  // what is over, while one bucket takes long
                ends.erase(ends.begin(), ends.begin() + position), position = 0;
            ends.insert(std::upper_bound(ends.begin() + position, ends.end(), end), end);
        } else {
            buckets.put(n, number, end);
        }
    }

    // whether anything will happen at all; if so, ends[position] is next
    bool look() {
        for (;;) {
            if (position == ends.size()) {
                position = 0;
                i64 next = buckets.take(number, ends);
                if (next < 0) return false;
                number = next;
                std::sort(ends.begin(), ends.end());
            }
            const End& end = ends[position];
            if (end.ending == WAKES || f.outcome[end.trip] == IN_FLIGHT) return true;
            position++;  // it was cancelled
        }
    }

    bool begin_trip(i64 trip, i64 client) {
        double duration = draw(DURATION, trip), factor;
        int ending = ARRIVES;
        if (f.scaled) {
            if (f.ask_factor(client, &factor)) throw Raised();
            duration *= factor;
        }
        if (!(0.0 <= duration && duration < INFINITY)) {
            f.bad_duration = duration;
            f.bad_trip = trip;
            return false;
        }
        if (f.dropout > 0 && draw(DROPOUT, trip) < f.dropout) duration *= draw(MOMENT, trip), ending = DROPS;
        if (duration > f.timeout) duration = f.timeout, ending = TIMES_OUT;
        put({f.now + duration, trip, ending});
        return true;
    }

    // ── the schedule ─────────────────────────────────────────────────────────────────────────────────────────────────

    i64 choose() {  // a free client, or -1
        if (busy_count >= f.clients) return -1;
        i64 client = i64(draw(CHOICE, ++f.draws) * double(f.clients));
        for (i64 i = 0; i < TRIES; i++) {
            if (!is_busy(client)) return client;
            client = i64(draw(CHOICE, ++f.draws) * double(f.clients));
        }
        i64 left = i64(draw(CHOICE, ++f.draws) * double(f.clients - busy_count));
        for (i64 word = 0;; word++) {
            i64 here = 64 - __builtin_popcountll(busy[word]);
            if (left >= here) {
                left -= here;
                continue;
            }
            for (client = word * 64;; client++)
                if (!is_busy(client) && left-- == 0) return client;
        }
    }

    int start_trips() {
        i64 arrived = 0;
        bool wake = false;
        while (f.rule == ARRIVALS && f.origin + f.next_arrival <= f.now) {
            arrived++;
            f.arrivals++;
            f.next_arrival = f.poisson ? f.next_arrival + draw(GAP, f.arrivals) / f.rate : double(f.arrivals) / f.rate;
            wake = true;
        }
        i64 wanted = f.rule == ARRIVALS ? arrived : f.rule == REFILL ? f.most - f.in_flight : f.most - f.in_flight - f.buffered;
        i64 first = f.started;
        for (i64 i = 0; i < wanted; i++) {
            i64 client = choose();
            if (client < 0) break;
            set_busy(client);
            i64 trip = f.started;
            if (trip == f.capacity && f.grow()) throw Raised();
            double examples = 1;
            if (f.ask_examples && f.ask_examples(client, &examples)) throw Raised();
            f.client[trip] = client;
            f.examples[trip] = f.sizes ? f.sizes[client] : i64(examples);
            f.start_time[trip] = f.now;
            f.start_version[trip] = f.version;
            f.started++;
            f.in_flight++;
        }
        for (i64 trip = first; trip < f.started; trip++)
            if (!begin_trip(trip, f.client[trip])) return BAD_DURATION;
        if (wake) put({f.origin + f.next_arrival, NEVER, WAKES});
        return REACHED;
    }

    void end(i64 trip, i64 version, int outcome) {
        f.end_time[trip] = f.now;
        f.end_version[trip] = version;
        f.outcome[trip] = std::uint8_t(outcome);
        f.order[f.ended++] = trip;
        f.in_flight--;
    }

    int step() {
        for (i64 i = 0; i < f.buffer_size; i++) {
            size_t staleness = size_t(f.staleness[i]);
            if (staleness >= weight_of.size()) weight_of.resize(staleness + 1 + staleness / 2, NAN);
            if (std::isnan(weight_of[staleness]) && f.ask_weight(i64(staleness), &weight_of[staleness])) throw Raised();
            f.weights[i] = weight_of[staleness];
        }
        i64 before = f.version++;
        for (i64 i = 0; i < f.buffer_size; i++) set_free(f.client[f.buffer[i]]);
        f.buffered = 0;
        if (f.rule == COHORT)  // all of it has started since the last step
            for (i64 trip = f.first; trip < f.started && f.in_flight; trip++)
                if (f.outcome[trip] == IN_FLIGHT) set_free(f.client[trip]), end(trip, before, CANCELLED);
        for (i64 i = 0; i < f.buffer_size; i++) {
            i64 trip = f.buffer[i];
            f.weight[trip] = f.weights[i];
            f.server_step[trip] = f.version;
            f.outcome[trip] = USED;
        }
        f.first = f.started;
        int how = start_trips();
        f.ended_at_step = f.ended;
        return how;
    }

    // with many trips in flight, what is known of one lies far from what is known of the next
    void fetch(i64 trip) {
        if (trip == NEVER) return;
        __builtin_prefetch(f.client + trip), __builtin_prefetch(f.start_version + trip);
        __builtin_prefetch(f.end_time + trip, 1), __builtin_prefetch(f.end_version + trip, 1);
        __builtin_prefetch(f.outcome + trip, 1);
    }

    int advance() {
        if (!look()) return NOTHING;
        End next = ends[position++];
        if (position + SOON < ends.size()) fetch(ends[position + SOON].trip);
        f.now = next.time;
        if (next.ending == WAKES) {
            i64 before = f.started;
            int how = start_trips();
            in_vain = f.started == before ? in_vain + 1 : 0;
            return how == REACHED && in_vain >= f.arrivals_in_vain ? IN_VAIN : how;
        }
        in_vain = 0;
        i64 trip = next.trip, staleness = f.version - f.start_version[trip];
        bool bad = !failed.empty() && std::binary_search(failed.begin(), failed.end(), trip);
        if (next.ending == ARRIVES && staleness <= f.limit && !bad) {
            end(trip, f.version, UNUSED);
            f.buffer[f.buffered] = trip;
            f.staleness[f.buffered++] = staleness;
            if (f.buffered == f.buffer_size) return step();
        } else {
            set_free(f.client[trip]);
            int refused = bad && staleness <= f.limit ? FAILED : LATE;
            end(trip, f.version, next.ending == DROPS ? DROPPED : next.ending == ARRIVES ? refused : LATE);
            if (f.ended - f.ended_at_step > f.hopeless) return HOPELESS;
        }
        return start_trips();
    }

    template <class Until> int go_on(Until until) {
        try {
            for (;;) {
                int how = until();
                if (how >= 0) return how;
                how = advance();
                if (how != REACHED) return how;
            }
        } catch (Raised) {
            return RAISED;
        } catch (const std::bad_alloc&) {
            return NO_MEMORY;
        }
    }
};

extern "C" {

Plan* plan_new(Facts* facts) { return new Plan(*facts); }

void plan_free(Plan* plan) { delete plan; }

i64 plan_begin(Plan* plan) {
    try {
        return plan->start_trips();
    } catch (Raised) {
        return RAISED;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

// until a server step makes `version`, so many trips have ended, or so much time has passed
i64 plan_run(Plan* plan, i64 version, i64 most_trips, double before) {
    Facts& f = plan->f;
    return plan->go_on([&]() -> int {
        if (f.version >= version) return REACHED;
        if (f.ended >= most_trips) return TRIPS;
        if (before < INFINITY) {
            if (!plan->look()) return NOTHING;
            if (plan->ends[plan->position].time > before) return TIME;
        }
        return -1;
    });
}

// until the first `trips` trips have all ended
i64 plan_follow(Plan* plan, i64 trips) {
    Facts& f = plan->f;
    i64 seen = 0, left = trips;
    return plan->go_on([&] {
        for (; seen < f.ended; seen++) left -= f.order[seen] < trips;
        return left ? -1 : REACHED;
    });
}

// when the next thing happens; NaN if nothing does
double plan_upcoming(Plan* plan) { return plan->look() ? plan->ends[plan->position].time : NAN; }

// the ends to come; how many, if there is no room for them
i64 plan_ends(Plan* plan, i64 room, double* times, i64* trips, i64* endings) {
    i64 count = i64(plan->ends.size() - plan->position), i = 0;
    plan->buckets.each([&](const End&) { count++; });
    if (count > room) return count;
    auto write = [&](const End& e) { times[i] = e.time, trips[i] = e.trip, endings[i++] = e.ending; };
    for (size_t at = plan->position; at < plan->ends.size(); at++) write(plan->ends[at]);
    plan->buckets.each(write);
    return count;
}

// take over: the facts are there already, these are who is busy, which trips fail, and the ends to come
void plan_restore(Plan* plan, i64 clients, const i64* client, i64 failed, const i64* fails, i64 count, const double* times,
                  const i64* trips, const i64* endings) {
    std::fill(plan->busy.begin(), plan->busy.end(), 0);
    plan->busy_count = 0;
    for (i64 i = 0; i < clients; i++) plan->set_busy(client[i]);
    plan->failed.assign(fails, fails + failed);
    plan->buckets.clear();
    plan->ends.clear();
    plan->position = 0;
    plan->number = -1;
    for (i64 i = 0; i < count; i++) plan->put({times[i], trips[i], int(endings[i])});
}
}
