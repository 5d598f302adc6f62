// Lets a process that aborts say its last word. abort() ends a process at once: gloo calls it by std::terminate in a
// thread of its own where ranks call different operations, and NCCL's watchdog where one runs out of time. The handler
// here tells a thread of Python by a pipe, and waits for its answer, a bounded time. Then whoever had the signal before
// gets it, by default the kernel, which ends the process.
//
// The handler calls only what is safe in one (signal-safety(7)), and does not wait in a thread that holds the GIL, which
// the answer needs.

#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <poll.h>
#include <unistd.h>

namespace {

struct sigaction former;
std::atomic<bool> is_set{false}, has_asked{false};
int tell, told, timeout_ms;
pid_t owner;
int (*holds_gil)();

int left_ms(const timespec& begin) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return timeout_ms - static_cast<int>((now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) / 1'000'000);
}

// Several threads may abort at a time: the first one asks, and all wait.
void wait_for_answer() {
    char byte = 0;
    if (!has_asked.exchange(true) && write(tell, &byte, 1) != 1) return;
    timespec begin;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    pollfd answer{told, POLLIN, 0};
    // Signals of other kinds interrupt a poll.
    for (int ms = timeout_ms; ms > 0; ms = left_ms(begin)) {
        if (poll(&answer, 1, ms) > 0) return;
    }
}

void on_abort(int number) {
    // A fork has no thread that answers.
    if (is_set && getpid() == owner && !holds_gil()) wait_for_answer();
    sigaction(number, &former, nullptr);
    raise(number);  // it is blocked until this handler returns
}

}  // namespace

extern "C" {

std::uint32_t source_check() { return SOURCE_CHECK; }

// Takes SIGABRT: `tell_fd` gets a byte, and `told_fd` has one when the answer is there. `gil_check` is PyGILState_Check.
int hold_aborts(int tell_fd, int told_fd, int most_ms, int (*gil_check)()) {
    tell = tell_fd, told = told_fd, timeout_ms = most_ms, holds_gil = gil_check, owner = getpid();
    has_asked = false;
    struct sigaction action {};
    action.sa_handler = on_abort;
    sigemptyset(&action.sa_mask);
    is_set = true;
    return sigaction(SIGABRT, &action, &former);
}

// Gives SIGABRT back, unless somebody else has taken it since, who may call this handler: it then waits for nothing.
void release_aborts() {
    is_set = false;
    struct sigaction current;
    if (sigaction(SIGABRT, nullptr, &current) == 0 && current.sa_handler == on_abort) sigaction(SIGABRT, &former, nullptr);
}
}
