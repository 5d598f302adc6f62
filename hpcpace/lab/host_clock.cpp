// Steps the clocks of the processes of a lab's host. Linux fixes the clocks of a time namespace when its first process
// enters, so the lab preloads this library (ld.so(8), LD_PRELOAD): the functions of libc that read clocks add what a file
// in the host's /dev/shm says, which `hpcpace lab fault clock` writes, and those that wait until a time subtract it.
// Where there is no such file, nothing is added. What waits while a clock is stepped waits as long as it was to.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

namespace {

constexpr auto steps_file = "/dev/shm/hpcpace-lab-clock";
// emulated.py writes this layout. CLOCK_MONOTONIC never goes back: after a step back it stands still until it is due.
struct Steps {
    std::atomic<std::int64_t> monotonic_ns, monotonic_floor_ns, realtime_ns;
};
const Steps none{};
const Steps* steps = &none;
constexpr std::int64_t second_ns = 1'000'000'000;
// CLOCK_REALTIME has passed it in 2001, and CLOCK_MONOTONIC does after 31 years: it tells times of the two apart. The
// clock of a pthread_cond_t is known to libc alone.
constexpr std::time_t least_realtime_s = 1'000'000'000;

__attribute__((constructor)) void map_steps() {
    const int file = open(steps_file, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0) return;
    struct stat facts;
    // Outside of hosts, everybody may make a file of this name.
    if (!fstat(file, &facts) && facts.st_uid == 0 && facts.st_size == sizeof(Steps)) {
        void* const found = mmap(nullptr, sizeof(Steps), PROT_READ, MAP_SHARED, file, 0);
        if (found != MAP_FAILED) steps = static_cast<const Steps*>(found);
    }
    close(file);
}

// The function of libc that one here stands before.
template <typename Function>
Function* next(const char* name, Function*& found) {
    if (!found) found = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
    return found;
}

std::int64_t nanoseconds(const timespec& time) { return time.tv_sec * second_ns + time.tv_nsec; }

timespec time_of(std::int64_t time_ns) { return {time_ns / second_ns, time_ns % second_ns}; }

std::int64_t stepped(clockid_t clock, std::int64_t time_ns) {
    constexpr auto relaxed = std::memory_order_relaxed;
    switch (clock) {
        case CLOCK_MONOTONIC:
        case CLOCK_MONOTONIC_RAW:
        case CLOCK_MONOTONIC_COARSE:
        case CLOCK_BOOTTIME:
            return std::max(time_ns + steps->monotonic_ns.load(relaxed), steps->monotonic_floor_ns.load(relaxed));
        case CLOCK_REALTIME:
        case CLOCK_REALTIME_COARSE:
        case CLOCK_TAI:
            return time_ns + steps->realtime_ns.load(relaxed);
        default:
            return time_ns;
    }
}

decltype(clock_gettime)* read_clock;
decltype(clock_nanosleep)* sleep_until;
decltype(pthread_cond_timedwait)* wait_for_condition;
decltype(sem_timedwait)* wait_for_semaphore;
// glibc has them since 2.30.
int (*wait_for_condition_by)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
int (*wait_for_semaphore_by)(sem_t*, clockid_t, const timespec*);

// When it is that time by the kernel's clock. While a clock stands still, what waits waits as long as it was to.
timespec due(const timespec* time) {
    const clockid_t clock = time->tv_sec < least_realtime_s ? CLOCK_MONOTONIC : CLOCK_REALTIME;
    timespec now;
    if (next("clock_gettime", read_clock)(clock, &now)) return *time;
    const std::int64_t ahead_ns = stepped(clock, nanoseconds(now)) - nanoseconds(now);
    return time_of(std::max<std::int64_t>(nanoseconds(*time) - ahead_ns, 0));
}

}  // namespace

extern "C" {

std::uint32_t source_check() { return SOURCE_CHECK; }

int clock_gettime(clockid_t clock, timespec* time) noexcept {
    const int status = next("clock_gettime", read_clock)(clock, time);
    if (!status) *time = time_of(stepped(clock, nanoseconds(*time)));
    return status;
}

int gettimeofday(timeval* time, void*) noexcept {
    timespec now;
    const int status = clock_gettime(CLOCK_REALTIME, &now);
    if (!status) *time = {now.tv_sec, now.tv_nsec / 1000};
    return status;
}

time_t time(time_t* place) noexcept {
    timespec now;
    if (clock_gettime(CLOCK_REALTIME_COARSE, &now)) return -1;
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}

int clock_nanosleep(clockid_t clock, int flags, const timespec* time, timespec* left) {
    const timespec end = flags & TIMER_ABSTIME ? due(time) : *time;
    return next("clock_nanosleep", sleep_until)(clock, flags, &end, left);
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* time) {
    const timespec end = due(time);
    return next("pthread_cond_timedwait", wait_for_condition)(condition, mutex, &end);
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* time) {
    const timespec end = due(time);
    return next("pthread_cond_clockwait", wait_for_condition_by)(condition, mutex, clock, &end);
}

int sem_timedwait(sem_t* semaphore, const timespec* time) {
    const timespec end = due(time);
    return next("sem_timedwait", wait_for_semaphore)(semaphore, &end);
}

int sem_clockwait(sem_t* semaphore, clockid_t clock, const timespec* time) {
    const timespec end = due(time);
    return next("sem_clockwait", wait_for_semaphore_by)(semaphore, clock, &end);
}
}
