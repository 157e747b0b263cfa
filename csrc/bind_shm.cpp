// Bindings of the node engine: check, release the GIL, call.
// Every array is .noconvert(): an implicit copy would be reduced and lost. Whoever starts a step
// keeps its arrays alive until it is over.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bind.hpp"
#include "kernels/reduce.hpp"
#include "loop/loop.hpp"
#include "shm/step.hpp"

namespace ringcomm {
namespace {

using NumpyBytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

struct Piece {
  std::shared_ptr<NodeMemory> memory;
  std::size_t offset, nbytes;
};

NumpyBytes take(std::shared_ptr<NodeMemory> memory, std::size_t nbytes) {
  const std::size_t offset = memory->allocator().take(nbytes);
  std::byte* data = memory->arena() + offset;
  auto piece = std::make_unique<Piece>(Piece{std::move(memory), offset, nbytes});
  nb::capsule owner(piece.get(), [](void* p) noexcept {
    const std::unique_ptr<Piece> last(static_cast<Piece*>(p));
    last->memory->allocator().give_back(last->offset, last->nbytes);
  });
  (void)piece.release();
  return NumpyBytes(data, {nbytes}, owner);
}

NumpyBytes view(std::shared_ptr<NodeMemory> memory, std::size_t offset, std::size_t nbytes) {
  std::byte* data = memory->arena() + offset;
  if (!memory->holds(data, nbytes)) throw std::invalid_argument("that is not in the arena");
  auto kept = std::make_unique<std::shared_ptr<NodeMemory>>(std::move(memory));
  nb::capsule owner(kept.get(), [](void* p) noexcept {
    const std::unique_ptr<std::shared_ptr<NodeMemory>> last(static_cast<std::shared_ptr<NodeMemory>*>(p));
  });
  (void)kept.release();
  return NumpyBytes(data, {nbytes}, owner);
}

std::size_t offset_of(const NodeMemory& memory, ConstBytes x) {
  if (!memory.holds(x.data(), x.nbytes())) throw std::invalid_argument("x is not in the arena");
  return static_cast<std::size_t>(reinterpret_cast<const std::byte*>(x.data()) - memory.arena());
}

std::shared_ptr<Team> make_team(std::size_t index, std::size_t context, bool is_crowded,
                                const std::vector<std::shared_ptr<NodeMemory>>& memories) {
  if (index >= memories.size()) throw std::invalid_argument("this rank is no member");
  struct Kept {
    std::vector<Mapping> windows;
    std::vector<std::shared_ptr<NodeMemory>> memories;
  };
  auto kept = std::make_shared<Kept>();
  std::vector<Mate> mates;
  for (const auto& memory : memories) {
    kept->windows.push_back(memory->window(context));
    mates.push_back({reinterpret_cast<Window*>(kept->windows.back().data()), &memory->bell(),
                     memory->arena(), memory->pid()});
  }
  kept->memories = memories;
  return std::make_shared<Team>(index, std::move(mates), memories[index], is_crowded, kept);
}

Meeting meeting_of(const std::shared_ptr<Team>& team, std::size_t slot, std::uint64_t fingerprint) {
  if (slot >= kSlots) throw std::invalid_argument("no slot " + std::to_string(slot));
  return {team, slot, fingerprint};
}

void require_elements(DType dtype, const void* data, std::size_t nbytes) {
  if (nbytes % itemsize(dtype) != 0 ||
      (nbytes != 0 && reinterpret_cast<std::uintptr_t>(data) % alignment(dtype) != 0))
    throw std::invalid_argument("buffer is no whole number of aligned elements");
}

// Where the slices of the members begin and end: whole cache lines as far as possible.
std::vector<std::size_t> shares(std::size_t nbytes, std::size_t n) {
  constexpr std::size_t line = 64;
  std::vector<std::size_t> bounds(n + 1, nbytes);
  for (std::size_t r = 0; r < n; ++r) bounds[r] = nbytes / line * r / n * line;
  return bounds;
}

// An allreduce in place that was made before, ready to be made again.
class KnownAllreduce {
 public:
  // moment_s: how long run() stays with it.
  KnownAllreduce(std::shared_ptr<Team> team, std::uint64_t fingerprint, std::size_t nbytes, int op,
                 int dtype, std::size_t divisor, double moment_s)
      : team_(std::move(team)),
        fingerprint_(fingerprint),
        nbytes_(nbytes),
        op_(static_cast<Op>(op)),
        dtype_(static_cast<DType>(dtype)),
        divisor_(divisor),
        moment_ns_(static_cast<std::int64_t>(moment_s * 1e9)) {
    if (divisor == 0) throw std::invalid_argument("divisor is 0");
  }

  // Begins it and stays with it for a moment; returns what is left to do, if anything.
  std::shared_ptr<NodeStep> run(std::size_t slot, std::uintptr_t address) const {
    auto* data = reinterpret_cast<std::byte*>(address);
    require_elements(dtype_, data, nbytes_);
    Meeting meeting = meeting_of(team_, slot, fingerprint_);
    nb::gil_scoped_release unlocked;
    const auto step = std::make_shared<ReduceStep>(
        std::move(meeting), Reduction{data, data, shares(nbytes_, team_->size()), Target::all, 0, op_,
                                      dtype_, divisor_});
    const bool is_over = drive(*step, *team_->me().bell, team_->patience(), moment_ns_);
    if (is_over && step->agrees() && step->fault().empty()) return nullptr;
    return step;
  }

  // x: writable and contiguous.
  std::shared_ptr<NodeStep> run_on(std::size_t slot, nb::handle x) const {
    Py_buffer view;
    if (PyObject_GetBuffer(x.ptr(), &view, PyBUF_WRITABLE) != 0) throw nb::python_error();
    const auto address = reinterpret_cast<std::uintptr_t>(view.buf);
    const auto nbytes = static_cast<std::size_t>(view.len);
    PyBuffer_Release(&view);  // the caller holds x
    if (nbytes != nbytes_) throw std::invalid_argument("x is no array of that size");
    return run(slot, address);
  }

 private:
  std::shared_ptr<Team> team_;
  std::uint64_t fingerprint_;
  std::size_t nbytes_;
  Op op_;
  DType dtype_;
  std::size_t divisor_;
  std::int64_t moment_ns_;
};

std::shared_ptr<NodeStep> start_reduce(const std::shared_ptr<Team>& team, std::size_t slot,
                                       std::uint64_t fingerprint, ConstBytes source,
                                       std::optional<Bytes> target, std::vector<std::size_t> bounds,
                                       int to, std::size_t root, int op, int code,
                                       std::size_t divisor) {
  const auto dtype = static_cast<DType>(code);
  const std::size_t n = team->size(), me = team->index();
  if (bounds.empty()) bounds = shares(source.nbytes(), n);
  if (bounds.size() != n + 1 || bounds.front() != 0 || bounds.back() != source.nbytes())
    throw std::invalid_argument("bounds must cut the source into a part per member");
  for (std::size_t r = 0; r < n; ++r)
    if (bounds[r] > bounds[r + 1] || bounds[r] % itemsize(dtype) != 0)
      throw std::invalid_argument("bounds must ascend, by whole elements");
  if (to < 0 || to > static_cast<int>(Target::root) || root >= n || divisor == 0)
    throw std::invalid_argument("no such target");
  const auto whom = static_cast<Target>(to);
  const std::size_t due = whom == Target::owner               ? bounds[me + 1] - bounds[me]
                          : whom == Target::all || root == me ? source.nbytes()
                                                              : 0;
  if ((target ? target->nbytes() : 0) != due)
    throw std::invalid_argument("target has another size than what is due");
  require_elements(dtype, source.data(), source.nbytes());
  if (target) require_elements(dtype, target->data(), due);
  return std::make_shared<ReduceStep>(
      meeting_of(team, slot, fingerprint),
      Reduction{reinterpret_cast<const std::byte*>(source.data()),
                target ? reinterpret_cast<std::byte*>(target->data()) : nullptr, std::move(bounds),
                whom, root, static_cast<Op>(op), dtype, divisor});
}

std::shared_ptr<NodeStep> start_copy(
    const std::shared_ptr<Team>& team, std::size_t slot, std::uint64_t fingerprint, ConstBytes shown,
    const std::vector<std::tuple<std::size_t, std::size_t, Bytes>>& pulls) {
  std::vector<Pull> wanted;
  wanted.reserve(pulls.size());
  for (const auto& [member, offset, target] : pulls) {
    if (member >= team->size()) throw std::invalid_argument("no such member");
    wanted.push_back({member, offset, target.nbytes(), reinterpret_cast<std::byte*>(target.data())});
  }
  return std::make_shared<CopyStep>(
      meeting_of(team, slot, fingerprint),
      Copy{reinterpret_cast<const std::byte*>(shown.data()), shown.nbytes(), std::move(wanted)});
}

bool drive_step(const std::shared_ptr<NodeStep>& step, double seconds) {
  nb::gil_scoped_release unlocked;
  return drive(*step, *step->team().me().bell, step->team().patience(),
               static_cast<std::int64_t>(seconds * 1e9));
}

}  // namespace

void bind_shm(nb::module_& m) {
  nb::class_<NodeMemory>(m, "NodeMemory")
      .def_static("create", &NodeMemory::create, "nonce"_a, "arena_nbytes"_a,
                  "page_nbytes"_a = page_nbytes())
      .def_static("open", &NodeMemory::open, "pid"_a, "board_fd"_a, "arena_fd"_a, "nonce"_a)
      .def_static("adopt",
                  [](int board_fd, int arena_fd, std::uint64_t nonce) {
                    return NodeMemory::adopt(Descriptor(board_fd), Descriptor(arena_fd), nonce);
                  },
                  "board_fd"_a, "arena_fd"_a, "nonce"_a)
      .def_prop_ro("board_fd", &NodeMemory::board_fd)
      .def_prop_ro("arena_fd", &NodeMemory::arena_fd)
      .def("holds", [](const NodeMemory& self, ConstBytes x) { return self.holds(x.data(), x.nbytes()); },
           "x"_a.noconvert())
      .def("offset_of", &offset_of, "x"_a.noconvert())
      .def("usage", [](NodeMemory& self) {
        const auto usage = self.allocator().usage();
        return std::tuple(usage.in_use, usage.kept, usage.highest);
      });
  m.def("take", &take, "memory"_a, "nbytes"_a);
  m.def("view", &view, "memory"_a, "offset"_a, "nbytes"_a);

  nb::class_<Team>(m, "Team")
      .def_prop_ro("index", &Team::index)
      .def_prop_ro("size", &Team::size)
      .def("abandon", &Team::abandon, nb::call_guard<nb::gil_scoped_release>());
  m.def("make_team", &make_team, "index"_a, "context"_a, "is_crowded"_a, "memories"_a);

  nb::class_<NodeStep, Program>(m, "NodeStep")
      .def_prop_ro("agrees", &NodeStep::agrees)
      .def("has_arrived", &NodeStep::has_arrived, "member"_a)
      .def_prop_ro("quitter", [](const NodeStep& step) -> std::optional<std::size_t> {
        if (step.quitter() == step.team().size()) return {};
        return step.quitter();
      })
      .def("drive", &drive_step, "seconds"_a);
  m.def("start_reduce", &start_reduce, "team"_a, "slot"_a, "fingerprint"_a, "source"_a.noconvert(),
        "target"_a.noconvert().none(), "bounds"_a, "to"_a, "root"_a, "op"_a, "dtype"_a, "divisor"_a);
  nb::class_<KnownAllreduce>(m, "KnownAllreduce")
      .def(nb::init<std::shared_ptr<Team>, std::uint64_t, std::size_t, int, int, std::size_t, double>(),
           "team"_a, "fingerprint"_a, "nbytes"_a, "op"_a, "dtype"_a, "divisor"_a, "moment_s"_a)
      .def("run", &KnownAllreduce::run)
      .def("run_on", &KnownAllreduce::run_on);
  m.def("start_copy", &start_copy, "team"_a, "slot"_a, "fingerprint"_a, "shown"_a.noconvert(), "pulls"_a);

  nb::class_<Loop>(m, "Loop")
      .def("__init__",
           [](Loop* self, std::shared_ptr<NodeMemory> memory, bool is_crowded) {
             Bell* bell = memory == nullptr ? nullptr : &memory->bell();
             new (self) Loop(bell, is_crowded ? kCrowded : kRoomy, std::move(memory));
           },
           "memory"_a.none(), "is_crowded"_a)
      .def("start_thread", &Loop::start_thread)
      .def("stop", &Loop::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("add", &Loop::add, "program"_a)
      .def_prop_ro("has_programs", &Loop::has_programs)
      .def("watch", &Loop::watch, "descriptor"_a)
      .def("yield_turn", &Loop::yield_turn)
      .def("park", &Loop::park, "seconds"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("await_news", &Loop::await_news, "seconds"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("settle", &Loop::settle, nb::call_guard<nb::gil_scoped_release>())
      .def("wake", &Loop::wake)
      .def("abandon", &Loop::abandon, "program"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace ringcomm
