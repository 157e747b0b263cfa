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

#include "bind_arrays.hpp"
#include "kernels/reduce.hpp"
#include "loop/loop.hpp"
#include "shm/copy_step.hpp"
#include "shm/known_call.hpp"

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

// x: None, an address, or a contiguous array of so many bytes, which the caller holds.
std::byte* address_of(nb::handle x, std::size_t nbytes, int flags) {
  if (x.is_none()) {
    if (nbytes != 0) throw std::invalid_argument("there is no array");
    return nullptr;
  }
  if (PyLong_Check(x.ptr())) return reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(x));
  Py_buffer view;
  if (PyObject_GetBuffer(x.ptr(), &view, flags) != 0) throw nb::python_error();
  void* const data = view.buf;
  const auto found = static_cast<std::size_t>(view.len);
  PyBuffer_Release(&view);
  if (found != nbytes) throw std::invalid_argument("the array has another size");
  return static_cast<std::byte*>(data);
}

std::shared_ptr<NodeStep> run_known(const KnownCall& self, std::size_t slot, nb::handle source,
                                    nb::handle target) {
  const std::byte* const from = address_of(source, self.source_nbytes(), PyBUF_SIMPLE);
  std::byte* const to = target.is(source) && self.target_nbytes() == self.source_nbytes()
                            ? const_cast<std::byte*>(from)
                            : address_of(target, self.target_nbytes(), PyBUF_WRITABLE);
  nb::gil_scoped_release unlocked;
  return self.run(slot, from, to);
}

using HeaderAndSize = std::tuple<nb::bytes, std::size_t>;

Shown shown_of(const HeaderAndSize& told) {
  const auto& [header, nbytes] = told;
  return {std::string(header.c_str(), header.size()), nbytes};
}

std::vector<Pull> pulls_of(const Team& team,
                           const std::vector<std::tuple<std::size_t, std::size_t, Bytes>>& told) {
  std::vector<Pull> pulls;
  pulls.reserve(told.size());
  for (const auto& [member, offset, target] : told) {
    if (member >= team.size()) throw std::invalid_argument("no such member");
    pulls.push_back({member, offset, target.nbytes(), reinterpret_cast<std::byte*>(target.data())});
  }
  return pulls;
}

std::shared_ptr<NodeStep> start_reduce(const std::shared_ptr<Team>& team, std::size_t slot,
                                       std::uint64_t fingerprint, ConstBytes source,
                                       std::optional<Bytes> target, std::vector<std::size_t> bounds,
                                       int to, std::size_t root, int op, int code,
                                       std::size_t divisor, bool is_widened) {
  const auto dtype = from_code<DType>("dtype", code);
  const std::size_t n = team->size();
  if (bounds.empty()) bounds = equal_bounds(source.nbytes(), n);
  NodeReduction reduction{reinterpret_cast<const std::byte*>(source.data()),
                          target ? reinterpret_cast<std::byte*>(target->data()) : nullptr,
                          std::move(bounds),
                          from_code<Target>("to", to),
                          root,
                          from_code<Op>("op", op),
                          dtype,
                          divisor,
                          is_widened};
  require_cut(reduction, n);
  if (reduction.bounds.back() != source.nbytes())
    throw std::invalid_argument("bounds must cut the source into a part per member");
  const std::size_t due = reduction.due_nbytes(team->index());
  if ((target ? target->nbytes() : 0) != due)
    throw std::invalid_argument("target has another size than what is due");
  require_elements(dtype, source.data(), source.nbytes());
  if (target) require_elements(is_widened ? DType::float32 : dtype, target->data(), due);
  return std::make_shared<ReduceStep>(Meeting(team, slot, fingerprint), std::move(reduction));
}

std::shared_ptr<CopyStep> start_copy(
    const std::shared_ptr<Team>& team, std::size_t slot, std::uint64_t fingerprint, ConstBytes shown,
    std::optional<std::vector<std::tuple<std::size_t, std::size_t, Bytes>>> pulls, nb::bytes header,
    std::shared_ptr<Places> places) {
  NodeCopy copy{reinterpret_cast<const std::byte*>(shown.data()), shown.nbytes(),
                std::string(header.c_str(), header.size()), std::nullopt, nullptr, std::move(places)};
  if (pulls) copy.pulls = pulls_of(*team, *pulls);
  return std::make_shared<CopyStep>(Meeting(team, slot, fingerprint), std::move(copy));
}

bool drive_step(const std::shared_ptr<NodeStep>& step, double seconds) {
  nb::gil_scoped_release unlocked;
  return drive(*step, *step->team().me().bell, step->team().patience(),
               nanoseconds(seconds));
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
      .def("clear_window", &NodeMemory::clear_window, "context"_a)
      .def("withdraw", &NodeMemory::withdraw)
      .def_prop_ro("is_withdrawn", &NodeMemory::is_withdrawn)
      .def("usage", [](NodeMemory& self) {
        const auto usage = self.allocator().usage();
        return std::tuple(usage.in_use, usage.kept, usage.highest);
      });
  m.def("take", &take, "memory"_a, "nbytes"_a);
  m.def("view", &view, "memory"_a, "offset"_a, "nbytes"_a);

  nb::class_<Team>(m, "Team")
      .def_prop_ro("index", &Team::index)
      .def_prop_ro("size", &Team::size)
      .def("abandon", &Team::abandon, nb::call_guard<nb::gil_scoped_release>())
      .def("retire", &Team::retire);
  m.def("make_team", &Team::of, "index"_a, "context"_a, "is_crowded"_a, "memories"_a);

  nb::class_<NodeStep, Program>(m, "NodeStep")
      .def_prop_ro("agrees", &NodeStep::agrees)
      .def("has_arrived", &NodeStep::has_arrived, "member"_a)
      .def_prop_ro("quitter", [](const NodeStep& step) -> std::optional<std::size_t> {
        if (step.quitter() == step.team().size()) return {};
        return step.quitter();
      })
      .def("drive", &drive_step, "seconds"_a);
  m.def("start_reduce", &start_reduce, "team"_a, "slot"_a, "fingerprint"_a, "source"_a.noconvert(),
        "target"_a.noconvert().none(), "bounds"_a, "to"_a, "root"_a, "op"_a, "dtype"_a, "divisor"_a,
        "is_widened"_a = false);
  nb::class_<KnownCall>(m, "KnownCall")
      .def("run", &run_known, "slot"_a, "source"_a.none(), "target"_a.none());
  nb::class_<KnownReduction, KnownCall>(m, "KnownReduction")
      .def("__init__",
           [](KnownReduction* self, std::shared_ptr<Team> team, std::uint64_t fingerprint,
              std::size_t nbytes, std::vector<std::size_t> bounds, int to, std::size_t root, int op,
              int dtype, std::size_t divisor, double moment_s) {
             if (bounds.empty()) bounds = equal_bounds(nbytes, team->size());
             NodeReduction what{nullptr,
                                nullptr,
                                std::move(bounds),
                                from_code<Target>("to", to),
                                root,
                                from_code<Op>("op", op),
                                from_code<DType>("dtype", dtype),
                                divisor};
             new (self) KnownReduction(std::move(team), fingerprint, std::move(what),
                                       nanoseconds(moment_s));
           },
           "team"_a, "fingerprint"_a, "nbytes"_a, "bounds"_a, "to"_a, "root"_a, "op"_a, "dtype"_a,
           "divisor"_a, "moment_s"_a);
  nb::class_<KnownCopy, KnownCall>(m, "KnownCopy")
      .def("__init__",
           [](KnownCopy* self, std::shared_ptr<Team> team, std::uint64_t fingerprint,
              const HeaderAndSize& mine,
              const std::vector<std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>>& parts,
              const std::vector<HeaderAndSize>& expected, double moment_s) {
             std::vector<KnownCopy::Part> pulls;
             for (const auto& [member, offset, nbytes, at] : parts)
               pulls.push_back({member, offset, nbytes, at});
             std::vector<Shown> due;
             for (const HeaderAndSize& each : expected) due.push_back(shown_of(each));
             new (self) KnownCopy(std::move(team), fingerprint, shown_of(mine), std::move(pulls),
                                  std::move(due), nanoseconds(moment_s));
           },
           "team"_a, "fingerprint"_a, "mine"_a, "parts"_a, "expected"_a, "moment_s"_a);
  nb::class_<Places>(m, "Places").def(nb::init<>()).def("take", &Places::take);
  nb::class_<CopyStep, NodeStep>(m, "CopyStep")
      .def_prop_ro("place", &CopyStep::place)
      .def_prop_ro("is_to_choose", &CopyStep::is_to_choose)
      .def("shown",
           [](const CopyStep& self) {
             std::vector<std::tuple<nb::bytes, std::size_t>> all;
             for (const Shown& each : self.shown())
               all.emplace_back(nb::bytes(each.header.data(), each.header.size()), each.nbytes);
             return all;
           })
      .def("choose",
           [](CopyStep& self, const std::vector<std::tuple<std::size_t, std::size_t, Bytes>>& pulls) {
             self.choose(pulls_of(self.team(), pulls));
           },
           "pulls"_a);
  m.def("start_copy", &start_copy, "team"_a, "slot"_a, "fingerprint"_a, "shown"_a.noconvert(),
        "pulls"_a.none(), "header"_a = nb::bytes("", 0), "places"_a.none() = nb::none());

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
