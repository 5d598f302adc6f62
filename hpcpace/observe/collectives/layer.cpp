// The layer of hpcpace/observe/collectives/observer.py in C++: the same operators, the same dispatch key, the same rows.
//
// It is optional and saves the conversion of every argument to Python and back, which is most of what the layer in
// Python costs. A kernel here never takes the GIL, except once for each new process group and to warn. The mutex is held
// only while records are changed: nothing of torch or Python runs under it, and no Work is destroyed under it, because
// freeing its tensors may take the GIL.

#include <atomic>
#include <chrono>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace py = pybind11;

namespace {

constexpr auto KEY = c10::DispatchKey::BackendSelect;
enum ExitKind : uint8_t { COMPLETION = 0, WAIT = 1, NEVER = 2, FAILED = 3 };

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// A row of the trace's `collectives` table; compiled.py checks that the schema has this layout.
#pragma pack(push, 1)
struct Row {
  int32_t step;
  uint16_t group;
  int64_t seq;
  uint8_t op;
  int64_t bytes;
  int32_t peer;
  int64_t enter_ns;
  int64_t exit_ns;
  int64_t blocked_ns;
  uint8_t exit_kind;
};
#pragma pack(pop)

// See class Operator in operators.py, which fills it; positions are -1 for none.
struct Operator {
  std::string name;
  uint8_t op;
  int group, payload, result, peer, async_op;
  bool per_member, has_work, is_message, is_recv;
};

struct Group {
  uint16_t id;
  std::vector<int32_t> ranks;
  int64_t first_number;
  // Collectives of a group are called in one order on all members; send and recv only between two ranks.
  std::map<std::pair<int, int64_t>, int64_t> sequences;

  int64_t& next_number(const std::pair<int, int64_t>& channel) {
    return sequences.try_emplace(channel, first_number).first->second;
  }
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

struct Open {
  Row row;
  WorkPtr work;
  uint64_t number;
  Group* group;
  const void* address = nullptr;
  bool is_message, is_recv, has_future;
  bool waiting = false;
  bool in_blocking_call = false;
};

// What is read from the arguments, before the operator consumes them.
struct Call {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  int64_t size_bytes = 0;
  int64_t peer = -1;
  bool is_blocking = false;
  const void* address = nullptr;
};

// A sparse tensor has neither an address nor a size of its own: gloo sends its indices and its values.
int64_t size_of(const at::Tensor& tensor) {
  size_t size = tensor.is_sparse() ? tensor._indices().nbytes() + tensor._values().nbytes() : tensor.nbytes();
  return static_cast<int64_t>(size);
}

const void* address_of(const at::Tensor& tensor) {
  return tensor.is_sparse() ? nullptr : tensor.const_data_ptr();
}

int64_t size_of(const c10::IValue& payload) {
  if (payload.isTensor()) {
    return size_of(payload.toTensor());
  }
  int64_t size = 0;
  if (payload.isTensorList()) {
    for (const at::Tensor& tensor : payload.toTensorList()) {
      size += size_of(tensor);
    }
  } else {
    for (const c10::IValue& part : payload.toListRef()) {
      size += size_of(part);
    }
  }
  return size;
}

const void* address_of(const c10::IValue& filled) {
  if (filled.isTensor()) {
    return address_of(filled.toTensor());
  }
  if (filled.isTensorList()) {
    auto tensors = filled.toTensorList();
    return tensors.empty() ? nullptr : address_of(tensors.get(0));
  }
  if (filled.isList()) {
    auto parts = filled.toListRef();
    return parts.empty() ? nullptr : address_of(parts[0]);
  }
  return nullptr;
}

class Layer : public std::enable_shared_from_this<Layer> {
 public:
  Layer(std::vector<Operator> operators, py::object new_group, py::object on_failure, size_t max_rows, int64_t first_number)
      : operators_(std::move(operators)),
        new_group_(std::move(new_group)),
        on_failure_(std::move(on_failure)),
        max_rows_(max_rows),
        first_number_(first_number) {}

  std::atomic<int32_t> step{-1};

  void install();

  // Takes no further operations; those that are open are followed until `uninstall`.
  void detach() {
    py::gil_scoped_release no_gil;  // the dispatcher's lock is taken
    libraries_.clear();
  }

  void uninstall() {
    detach();
    // A callback on another thread may own the layer last, where no Python object can be freed.
    new_group_ = on_failure_ = py::none();
    note_completed();
    std::vector<WorkPtr> works;  // destroyed when the mutex is free again
    std::lock_guard<std::mutex> lock(mutex_);
    close_completed(works);
    while (!open_.empty()) {
      auto& opened = open_.begin()->second;
      opened.row.exit_kind = NEVER;
      close(opened, 0, works);
    }
  }

  bool has_open() {
    std::vector<WorkPtr> works;
    std::lock_guard<std::mutex> lock(mutex_);
    close_completed(works);
    return !open_.empty();
  }

  // Records operations that nobody waits for: those that are complete, and messages issued long ago.
  void end_step(int32_t ended, int32_t forget_after_steps) {
    std::vector<WorkPtr> works;
    std::vector<std::pair<WorkPtr, uint64_t>> waiting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      step = ended + 1;
      close_completed(works);
      for (auto& [work, opened] : open_) {
        waiting.emplace_back(opened.work, opened.number);
      }
    }
    for (auto& [work, number] : waiting) {
      bool is_completed = work->isCompleted();
      std::lock_guard<std::mutex> lock(mutex_);
      Open* opened = find(work.get(), number);
      if (opened == nullptr) {
        continue;
      }
      if (is_completed) {
        if (opened->row.exit_kind != FAILED) {
          opened->row.exit_kind = WAIT;
        }
        close(*opened, opened->row.exit_ns ? opened->row.exit_ns : now_ns(), works);
      } else if (opened->is_message && ended - opened->row.step >= forget_after_steps) {
        opened->row.exit_kind = NEVER;
        close(*opened, 0, works);
      }
    }
  }

  // What this thread calls from now on, torch waits for by itself, in C++, where no wait is seen.
  void begin_blocking_call() {
    std::lock_guard<std::mutex> lock(mutex_);
    blocking_thread_ = std::this_thread::get_id();
  }

  // It was blocked until what it called completed; after an error, what has not stays open.
  void end_blocking_call(bool has_returned) {
    const int64_t end_ns = now_ns();
    std::vector<WorkPtr> works;
    std::lock_guard<std::mutex> lock(mutex_);
    blocking_thread_ = {};
    std::vector<Open*> waited;
    for (auto& [work, opened] : open_) {
      if (std::exchange(opened.in_blocking_call, false)) {
        waited.push_back(&opened);
      }
    }
    for (Open* opened : waited) {
      opened->waiting = false;
      opened->row.blocked_ns = (opened->row.exit_ns ? opened->row.exit_ns : end_ns) - opened->row.enter_ns;
      if (has_returned || opened->row.exit_ns) {
        opened->row.exit_kind = opened->row.exit_ns ? opened->row.exit_kind : WAIT;
        close(*opened, opened->row.exit_ns ? opened->row.exit_ns : end_ns, works);
      }
    }
    close_completed(works);
  }

  // Returns the rows since the last call, and how many more there was no room for.
  std::pair<py::bytes, size_t> take_rows() {
    std::vector<Row> rows;
    std::vector<WorkPtr> works;
    size_t num_dropped;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      close_completed(works);
      rows.swap(rows_);
      num_dropped = std::exchange(num_dropped_, 0);
    }
    return {as_bytes(rows), num_dropped};
  }

  py::bytes open_rows() {
    std::vector<Row> rows;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [work, opened] : open_) {
        if (!opened.row.exit_ns) {
          rows.push_back(opened.row);
          rows.back().exit_kind = NEVER;
        }
      }
    }
    return as_bytes(rows);
  }

  // Returns how many operations were called: group, kind of a message or -1, rank of its other end or -1, number.
  std::vector<std::tuple<uint16_t, int, int32_t, int64_t>> entered() {
    std::vector<std::tuple<uint16_t, int, int32_t, int64_t>> counts;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [name, group] : groups_) {
      for (const auto& [channel, number] : group.sequences) {
        const bool has_peer = channel.first >= 0 && channel.second >= 0;
        counts.emplace_back(group.id, channel.first, has_peer ? group.ranks.at(channel.second) : -1, number);
      }
    }
    return counts;
  }

  // The kernel of one operator.
  void observe(const Operator& op, const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto rest = keys.remove(KEY);
    Call call;
    bool is_described = guarded(op, [&] { describe(op, handle, *stack, call); });
    const int64_t enter_ns = now_ns();
    try {
      handle.redispatchBoxed(rest, stack);
    } catch (...) {
      const int64_t failed_ns = now_ns();
      if (is_described) {
        guarded(op, [&] { keep_failed(op, call, enter_ns, failed_ns); });
      }
      throw;
    }
    const int64_t left_ns = now_ns();
    if (is_described) {
      guarded(op, [&] { follow(op, call, enter_ns, left_ns, *stack); });
    }
  }

  void observe_wait_tensor(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto rest = keys.remove(KEY);
    WorkPtr work;
    uint64_t number = 0;
    if (num_addresses_ > 0) {
      const void* address = address_or_null(stack->back());
      std::lock_guard<std::mutex> lock(mutex_);
      auto key = by_address_.find(address);
      auto place = key == by_address_.end() ? open_.end() : open_.find(key->second);
      if (place != open_.end()) {
        place->second.waiting = true;
        work = place->second.work;
        number = place->second.number;
      }
    }
    if (!work) {
      handle.redispatchBoxed(rest, stack);
      return;
    }
    const int64_t begin_ns = now_ns();
    try {
      handle.redispatchBoxed(rest, stack);
    } catch (...) {
      gave_up_waiting(work.get(), number, begin_ns);
      throw;
    }
    waited(work.get(), number, begin_ns, now_ns());
  }

  // Work.wait: `original` is torch's, `arguments` as in vectorcall.
  PyObject* observe_wait(PyObject* original, PyObject* const* arguments, Py_ssize_t num_arguments, PyObject* names) {
    WorkPtr work;
    uint64_t number = 0;
    if (num_open_ > 0 && num_arguments > 0) {
      py::detail::type_caster_base<c10d::Work> caster;
      if (caster.load(arguments[0], false)) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto place = open_.find(static_cast<c10d::Work*>(caster));
        if (place != open_.end()) {
          place->second.waiting = true;
          work = place->second.work;
          number = place->second.number;
        }
      }
    }
    if (!work) {
      return PyObject_Vectorcall(original, arguments, num_arguments, names);
    }
    const int64_t begin_ns = now_ns();
    PyObject* result = PyObject_Vectorcall(original, arguments, num_arguments, names);
    if (result == nullptr) {
      gave_up_waiting(work.get(), number, begin_ns);
    } else {
      waited(work.get(), number, begin_ns, now_ns());
    }
    return result;
  }

 private:
  template <class Block>
  bool guarded(const Operator& op, Block block) {  // the boundary to the training job: degrade, never raise
    try {
      block();
      return true;
    } catch (const c10::Error& error) {
      degrade(op, error.what_without_backtrace());
    } catch (const std::exception& error) {
      degrade(op, error.what());
    } catch (...) {
      degrade(op, "unknown error");
    }
    return false;
  }

  void degrade(const Operator& op, const std::string& reason) {
    py::gil_scoped_acquire gil;
    try {
      on_failure_(op.name, reason);
    } catch (py::error_already_set&) {  // nobody is left to tell
    }
  }

  static const void* address_or_null(const c10::IValue& value) {
    try {
      return address_of(value);
    } catch (...) {  // a tensor without memory
      return nullptr;
    }
  }

  static void describe(const Operator& op, const c10::OperatorHandle& handle, const torch::jit::Stack& stack, Call& call) {
    const c10::IValue* arguments = stack.data() + (stack.size() - handle.schema().arguments().size());
    call.group = arguments[op.group].toCustomClass<c10d::ProcessGroup>();
    call.size_bytes = op.payload < 0 ? 0 : size_of(arguments[op.payload]);
    call.peer = op.peer < 0 ? -1 : arguments[op.peer].toInt();
    call.is_blocking = op.async_op >= 0 && !arguments[op.async_op].toBool();
    if (op.has_work && !op.is_message && !call.is_blocking && op.result >= 0) {
      call.address = address_of(arguments[op.result]);
    }
  }

  Group& group_of(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group) {
    const std::string& name = process_group->getGroupName();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto place = groups_.find(name);
      if (place != groups_.end()) {
        return place->second;
      }
    }
    uint16_t id;
    std::vector<int32_t> ranks;
    {
      py::gil_scoped_acquire gil;
      std::tie(id, ranks) = new_group_(py::cast(process_group)).cast<std::tuple<uint16_t, std::vector<int32_t>>>();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    return groups_.try_emplace(name, Group{id, std::move(ranks), first_number_, {}}).first->second;  // never removed: stays valid
  }

  // The row of a call that has returned, without its number and its end.
  Row new_row(const Operator& op, const Call& call, const Group& group, int64_t enter_ns, int64_t left_ns) {
    Row row{};
    row.step = step;
    row.group = group.id;
    row.op = op.op;
    row.bytes = op.per_member ? call.size_bytes * static_cast<int64_t>(group.ranks.size()) : call.size_bytes;
    row.peer = call.peer >= 0 ? group.ranks.at(call.peer) : -1;
    row.enter_ns = enter_ns;
    row.blocked_ns = left_ns - enter_ns;  // gloo may do part of the work before it returns
    return row;
  }

  static std::pair<int, int64_t> channel_of(const Operator& op, const Call& call) {
    return op.is_message ? std::pair<int, int64_t>(op.op, call.peer) : std::pair<int, int64_t>(-1, 0);
  }

  // Records an operation whose call raised.
  void keep_failed(const Operator& op, const Call& call, int64_t enter_ns, int64_t failed_ns) {
    Group& group = group_of(call.group);
    Row row = new_row(op, call, group, enter_ns, failed_ns);
    row.exit_ns = failed_ns;
    row.exit_kind = FAILED;
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t& next = group.next_number(channel_of(op, call));
    // One with a work was never issued: the next one of the group has its number.
    row.seq = op.has_work ? next : next++;
    keep(row);
  }

  void follow(const Operator& op, const Call& call, int64_t enter_ns, int64_t left_ns, const torch::jit::Stack& stack) {
    Group& group = group_of(call.group);
    WorkPtr work;
    if (op.has_work) {
      work = stack.back().toCustomClass<c10d::Work>();
    }
    Row row = new_row(op, call, group, enter_ns, left_ns);
    row.exit_kind = op.has_work ? COMPLETION : WAIT;
    const FuturePtr future = future_of(work, op, call);
    uint64_t number;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      row.seq = group.next_number(channel_of(op, call))++;
      if (!work) {
        row.exit_ns = left_ns;
        keep(row);
        return;
      }
      number = ++last_number_;
      const bool blocks = blocking_thread_ == std::this_thread::get_id();
      open_[work.get()] =
          Open{row, work, number, &group, call.address, op.is_message, op.is_recv, future != nullptr, blocks, blocks};
      if (call.address != nullptr) {
        by_address_[call.address] = work.get();
      }
      count();
    }
    if (future == nullptr) {
      return;
    }
    future->addCallback([layer = shared_from_this(), key = work.get(), number](c10::ivalue::Future& future) {
      layer->completed(key, number, future.hasError());
    });
  }

  // gloo's messages and coalesced reduce_scatters have no future; a blocking caller waits at once and closes it.
  static FuturePtr future_of(const WorkPtr& work, const Operator& op, const Call& call) {
    if (!work || op.is_message || call.is_blocking) {
      return nullptr;
    }
    try {
      return work->getFuture();
    } catch (const c10::Error&) {
      return nullptr;
    }
  }

  // Takes the ends whose callbacks have not run yet: whoever waits for a future goes on before them.
  void note_completed() {
    std::vector<std::pair<WorkPtr, uint64_t>> waiting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [work, opened] : open_) {
        if (opened.has_future && !opened.row.exit_ns) {
          waiting.emplace_back(opened.work, opened.number);
        }
      }
    }
    for (auto& [work, number] : waiting) {
      auto future = work->getFuture();
      if (future->completed()) {
        completed(work.get(), number, future->hasError());
      }
    }
  }

  // Called on a thread of the backend: only the time is taken there.
  void completed(c10d::Work* key, uint64_t number, bool has_failed) {
    const int64_t exit_ns = now_ns();
    std::lock_guard<std::mutex> lock(mutex_);
    if (Open* opened = find(key, number)) {
      opened->row.exit_ns = exit_ns;
      opened->row.exit_kind = has_failed ? FAILED : COMPLETION;
      completed_.emplace_back(key, number);
    }
  }

  // Records an operation whose wait raised; where only the wait timed out, it stays open.
  void gave_up_waiting(c10d::Work* key, uint64_t number, int64_t begin_ns) {
    const int64_t end_ns = now_ns();
    const bool has_failed = key->isCompleted();
    std::vector<WorkPtr> works;
    std::lock_guard<std::mutex> lock(mutex_);
    if (Open* opened = find(key, number)) {
      opened->waiting = false;
      opened->row.blocked_ns += end_ns - begin_ns;
      if (has_failed && !opened->row.exit_ns) {
        opened->row.exit_kind = FAILED;
        close(*opened, end_ns, works);
      }
    }
    close_completed(works);
  }

  void waited(c10d::Work* key, uint64_t number, int64_t begin_ns, int64_t end_ns) {
    const int64_t source = source_of(key, number);
    std::vector<WorkPtr> works;
    std::lock_guard<std::mutex> lock(mutex_);
    if (Open* opened = find(key, number)) {
      opened->row.blocked_ns += end_ns - begin_ns;
      if (!opened->row.exit_ns) {
        opened->row.exit_kind = WAIT;
        if (source >= 0) {
          opened->row.peer = opened->group->ranks.at(source);
          opened->row.seq = opened->group->next_number({opened->row.op, source})++;
        }
      }
      close(*opened, opened->row.exit_ns ? opened->row.exit_ns : end_ns, works);
    }
    close_completed(works);
  }

  // The sender of a receive from anybody, once it is over; -1 for all other operations.
  int64_t source_of(c10d::Work* key, uint64_t number) {
    WorkPtr work;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Open* opened = find(key, number);
      if (opened == nullptr || !opened->is_recv || opened->row.peer >= 0) {
        return -1;
      }
      work = opened->work;
    }
    return work->sourceRank();
  }

  // What follows is called with the mutex held; works go into a list that the caller destroys without it.

  Open* find(c10d::Work* key, uint64_t number) {
    auto place = open_.find(key);
    return place == open_.end() || place->second.number != number ? nullptr : &place->second;
  }

  void close_completed(std::vector<WorkPtr>& works) {
    for (auto& [key, number] : completed_) {
      Open* opened = find(key, number);
      if (opened != nullptr && !opened->waiting) {
        close(*opened, opened->row.exit_ns, works);
      }
    }
    completed_.clear();
  }

  void close(Open& opened, int64_t exit_ns, std::vector<WorkPtr>& works) {
    Row row = opened.row;
    row.exit_ns = exit_ns;
    if (exit_ns) {
      row.blocked_ns = std::min(row.blocked_ns, exit_ns - row.enter_ns);
    }
    keep(row);
    c10d::Work* key = opened.work.get();
    auto place = by_address_.find(opened.address);
    if (place != by_address_.end() && place->second == key) {
      by_address_.erase(place);
    }
    works.push_back(std::move(opened.work));
    open_.erase(key);
    count();
  }

  void keep(const Row& row) {
    if (rows_.size() < max_rows_) {
      rows_.push_back(row);
    } else {
      ++num_dropped_;
    }
  }

  void count() {
    num_open_ = open_.size();
    num_addresses_ = by_address_.size();
  }

  static py::bytes as_bytes(const std::vector<Row>& rows) {
    return py::bytes(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(Row));
  }

  const std::vector<Operator> operators_;
  py::object new_group_, on_failure_;
  const size_t max_rows_;
  const int64_t first_number_;
  std::vector<torch::Library> libraries_;

  std::mutex mutex_;
  std::unordered_map<std::string, Group> groups_;
  std::unordered_map<c10d::Work*, Open> open_;
  std::unordered_map<const void*, c10d::Work*> by_address_;
  std::vector<std::pair<c10d::Work*, uint64_t>> completed_;
  std::vector<Row> rows_;
  size_t num_dropped_ = 0;
  uint64_t last_number_ = 0;
  std::thread::id blocking_thread_;  // none
  // Read without the mutex, for the many calls that concern no open operation.
  std::atomic<size_t> num_open_{0}, num_addresses_{0};
};

struct OperatorKernel final : c10::OperatorKernel {
  OperatorKernel(std::shared_ptr<Layer> layer, Operator op) : layer(std::move(layer)), op(std::move(op)) {}
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    layer->observe(op, handle, keys, stack);
  }
  const std::shared_ptr<Layer> layer;
  const Operator op;
};

struct WaitTensorKernel final : c10::OperatorKernel {
  explicit WaitTensorKernel(std::shared_ptr<Layer> layer) : layer(std::move(layer)) {}
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    layer->observe_wait_tensor(handle, keys, stack);
  }
  const std::shared_ptr<Layer> layer;
};

void Layer::install() {
  libraries_.emplace_back(torch::Library::IMPL, "c10d", KEY, __FILE__, __LINE__);
  for (const Operator& op : operators_) {
    auto kernel = std::make_unique<OperatorKernel>(shared_from_this(), op);
    libraries_.back().impl(op.name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }
  libraries_.emplace_back(torch::Library::IMPL, "_c10d_functional", KEY, __FILE__, __LINE__);
  auto kernel = std::make_unique<WaitTensorKernel>(shared_from_this());
  libraries_.back().impl("wait_tensor", torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
}

// What Work.wait is replaced by: a function that binds like a method, around torch's own.
struct Wait {
  std::shared_ptr<Layer> layer;
  py::object original;
};

PyObject* call_wait(PyObject* capsule, PyObject* const* arguments, Py_ssize_t num_arguments, PyObject* names) {
  auto* wait = static_cast<Wait*>(PyCapsule_GetPointer(capsule, nullptr));
  return wait->layer->observe_wait(wait->original.ptr(), arguments, num_arguments, names);
}

PyMethodDef WAIT_METHOD = {
    "wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_wait)), METH_FASTCALL | METH_KEYWORDS, nullptr};

py::object observed_wait(std::shared_ptr<Layer> layer, py::object original) {
  py::capsule capsule(new Wait{std::move(layer), std::move(original)}, [](void* wait) { delete static_cast<Wait*>(wait); });
  auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&WAIT_METHOD, capsule.ptr()));
  return py::reinterpret_steal<py::object>(PyInstanceMethod_New(function.ptr()));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("source_check") = SOURCE_CHECK;
  py::class_<Operator>(module, "Operator")
      .def(py::init([](std::string name, uint8_t op, int group, int payload, int result, int peer, int async_op,
                       bool per_member, bool has_work, bool is_message, bool is_recv) {
        return Operator{std::move(name), op, group, payload, result, peer, async_op, per_member, has_work, is_message, is_recv};
      }));
  py::class_<Layer, std::shared_ptr<Layer>>(module, "Layer")
      .def(py::init<std::vector<Operator>, py::object, py::object, size_t, int64_t>())
      .def_property("step", [](Layer& layer) { return layer.step.load(); }, [](Layer& layer, int32_t step) { layer.step = step; })
      .def_property_readonly("has_open", &Layer::has_open)
      .def("install", &Layer::install)
      .def("detach", &Layer::detach)
      .def("uninstall", &Layer::uninstall)
      .def("end_step", &Layer::end_step, py::call_guard<py::gil_scoped_release>())
      .def("begin_blocking_call", &Layer::begin_blocking_call)
      .def("end_blocking_call", &Layer::end_blocking_call)
      .def("take_rows", &Layer::take_rows)
      .def("open_rows", &Layer::open_rows)
      .def("entered", &Layer::entered)
      .def("observed_wait", [](std::shared_ptr<Layer> layer, py::object original) {
        return observed_wait(std::move(layer), std::move(original));
      });
}
