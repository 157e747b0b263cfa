// Bindings of the node engine: check, release the GIL, call.
// Every array is .noconvert(): an implicit copy would be reduced and lost. Whoever starts a step
// keeps its arrays alive until it is over.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_arrays.hpp"
#include "kernels/reduce.hpp"
#include "loop/loop.hpp"
#include "loop/run_schedule.hpp"
#include "loop/scheduled_step.hpp"
#include "loop/wire_step.hpp"
#include "shm/copy_step.hpp"
#include "p2p/halo.hpp"
#include "shm/known_call.hpp"
#include "p2p/peer_messages.hpp"

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

std::shared_ptr<CollectiveStep> run_known(const KnownCall& self, std::size_t slot, nb::handle source,
                                          nb::handle target) {
  const std::byte* const from = address_of(source, self.source_nbytes(), PyBUF_SIMPLE);
  std::byte* const to = target.is(source) && self.target_nbytes() == self.source_nbytes()
                            ? const_cast<std::byte*>(from)
                            : address_of(target, self.target_nbytes(), PyBUF_WRITABLE);
  nb::gil_scoped_release unlocked;
  return self.run(slot, from, to);
}

std::shared_ptr<CollectiveStep> run_known_in_place(const KnownCall& self, std::size_t slot, nb::handle x) {
  const std::size_t nbytes = self.target_nbytes();
  if (self.source_nbytes() != nbytes) throw std::invalid_argument("source and target have two sizes");
  std::byte* const data = address_of(x, nbytes, PyBUF_WRITABLE);
  nb::gil_scoped_release unlocked;
  return self.run(slot, data, data);
}

using HeaderAndSize = std::tuple<nb::bytes, std::size_t>;

Shown shown_of(const HeaderAndSize& told) {
  const auto& [header, nbytes] = told;
  return {std::string(header.c_str(), header.size()), nbytes};
}

std::vector<Shown> all_shown_of(const std::vector<HeaderAndSize>& told) {
  std::vector<Shown> all;
  for (const HeaderAndSize& each : told) all.push_back(shown_of(each));
  return all;
}

std::vector<Pull> pulls_of(std::size_t n_members,
                           const std::vector<std::tuple<std::size_t, std::size_t, Bytes>>& told) {
  std::vector<Pull> pulls;
  pulls.reserve(told.size());
  for (const auto& [member, offset, target] : told) {
    if (member >= n_members) throw std::invalid_argument("no such member");
    pulls.push_back({member, offset, target.nbytes(), reinterpret_cast<std::byte*>(target.data())});
  }
  return pulls;
}

std::shared_ptr<CollectiveStep> start_reduce(MeetingPlace& team, std::size_t slot,
                                             std::uint64_t fingerprint, ConstBytes source,
                                             std::optional<Bytes> target,
                                             std::vector<std::size_t> bounds, int to, std::size_t root,
                                             int op, int code, std::size_t divisor, bool is_widened) {
  const auto dtype = from_code<DType>("dtype", code);
  const std::size_t n = team.n_members();
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
  const std::size_t due = reduction.due_nbytes(team.own_index());
  if ((target ? target->nbytes() : 0) != due)
    throw std::invalid_argument("target has another size than what is due");
  require_elements(dtype, source.data(), source.nbytes());
  if (target) require_elements(is_widened ? DType::float32 : dtype, target->data(), due);
  return team.begin(slot, fingerprint, std::move(reduction));
}

std::shared_ptr<CollectiveStep> start_copy(
    MeetingPlace& team, std::size_t slot, std::uint64_t fingerprint, ConstBytes shown,
    std::optional<std::vector<std::tuple<std::size_t, std::size_t, Bytes>>> pulls, nb::bytes header,
    std::shared_ptr<Places> places, bool is_whole) {
  NodeCopy copy{reinterpret_cast<const std::byte*>(shown.data()), shown.nbytes(),
                std::string(header.c_str(), header.size()), std::nullopt, nullptr, std::move(places),
                is_whole};
  if (pulls) copy.pulls = pulls_of(team.n_members(), *pulls);
  return team.begin(slot, fingerprint, std::move(copy));
}

// What is alike in many messages, and who carries them.
struct Correspondence {
  std::shared_ptr<PeerMessages> messages;
  SharedEnvelope envelope;
};

Correspondence correspondence(std::shared_ptr<PeerMessages> messages, std::optional<std::uint32_t> rank,
                std::uint64_t group, nb::bytes outline, std::size_t nbytes) {
  if (rank && !messages->reaches(*rank)) throw std::invalid_argument("there is no such rank");
  return {std::move(messages),
          std::make_shared<const Envelope>(
              Envelope{rank.value_or(kAnyRank), group,
                             std::string(outline.c_str(), outline.size()), nbytes})};
}

// The address of an array as it is, as address_of() has it; nothing if C++ cannot take it so.
std::optional<std::byte*> plain_address_of(nb::handle x, std::size_t nbytes, int flags) {
  if (PyLong_Check(x.ptr())) return reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(x));
  Py_buffer view;
  if (PyObject_GetBuffer(x.ptr(), &view, flags) != 0) {
    PyErr_Clear();
    return {};
  }
  void* const data = view.buf;
  const auto found = static_cast<std::size_t>(view.len);
  PyBuffer_Release(&view);
  if (found != nbytes) return {};
  return static_cast<std::byte*>(data);
}

std::int64_t tag_of(nb::handle tag) {
  return static_cast<std::int64_t>(PyLong_AsUnsignedLongLongMask(tag.ptr()));
}

nb::object sent(const std::shared_ptr<PeerMessage>& rest) {
  return rest == nullptr ? nb::bool_(true) : nb::cast(rest);
}

nb::object received(const std::shared_ptr<PeerMessage>& rest, std::uint32_t source) {
  return rest == nullptr ? nb::int_(source) : nb::cast(rest);
}

// True once it is sent, or what is left of it. None if it has not begun: x must be prepared.
nb::object send_message(const Correspondence& self, nb::handle x, nb::handle tag, double seconds) {
  const auto data = plain_address_of(x, self.envelope->nbytes, PyBUF_SIMPLE);
  if (!data || !PyLong_CheckExact(tag.ptr())) return nb::none();
  const std::int64_t number = tag_of(tag);
  std::shared_ptr<PeerMessage> rest;
  {
    nb::gil_scoped_release unlocked;
    rest = self.messages->send(self.envelope, number, *data, nanoseconds(seconds));
  }
  return sent(rest);
}

// The rank that sent it, or what is left of it. None if it has not begun: `out` must be prepared.
nb::object receive_message(const Correspondence& self, nb::handle out, nb::handle tag, double seconds) {
  const auto to = plain_address_of(out, self.envelope->nbytes, PyBUF_WRITABLE);
  if (!to || !PyLong_CheckExact(tag.ptr())) return nb::none();
  const std::int64_t number = tag_of(tag);
  std::uint32_t source = kAnyRank;
  std::shared_ptr<PeerMessage> rest;
  {
    nb::gil_scoped_release unlocked;
    rest = self.messages->receive(self.envelope, number, *to, nanoseconds(seconds), source);
  }
  return received(rest, source);
}

// Both results. None if neither has begun: an array must be prepared, or they overlap.
nb::object exchange_messages(const Correspondence& to, nb::handle x, nb::handle sendtag,
                             const Correspondence& from, nb::handle out, nb::handle recvtag,
                             double seconds) {
  const auto data = plain_address_of(x, to.envelope->nbytes, PyBUF_SIMPLE);
  const auto target = plain_address_of(out, from.envelope->nbytes, PyBUF_WRITABLE);
  if (!data || !target || !PyLong_CheckExact(sendtag.ptr()) || !PyLong_CheckExact(recvtag.ptr()))
    return nb::none();
  if (*data < *target + from.envelope->nbytes && *target < *data + to.envelope->nbytes) return nb::none();
  const std::int64_t tags[] = {tag_of(sendtag), tag_of(recvtag)};
  std::uint32_t source = kAnyRank;
  std::pair<std::shared_ptr<PeerMessage>, std::shared_ptr<PeerMessage>> rest;
  {
    nb::gil_scoped_release unlocked;
    rest = to.messages->exchange(to.envelope, tags[0], *data, from.envelope, tags[1], *target,
                                 nanoseconds(seconds), source);
  }
  return nb::make_tuple(sent(rest.first), received(rest.second, source));
}

using CellsAsTuple = std::tuple<std::ptrdiff_t, std::vector<std::pair<std::size_t, std::ptrdiff_t>>, std::size_t,
                               std::uintptr_t>;
using HaloSides = std::vector<std::tuple<const Correspondence*, std::int64_t, CellsAsTuple>>;

std::vector<KnownHalo::Side> halo_sides(const HaloSides& sides) {
  std::vector<KnownHalo::Side> made;
  for (const auto& [known, tag, cells] : sides) {
    const auto& [offset, outer, run_nbytes, buffer] = cells;
    std::size_t nbytes = run_nbytes;
    for (const auto& [length, stride] : outer) nbytes *= length;
    if (nbytes != known->envelope->nbytes || (buffer != 0 && outer.empty()) || known->envelope->rank == kAnyRank)
      throw std::invalid_argument("these cells are no message of that correspondence");
    made.push_back({known->envelope, tag, {offset, outer, run_nbytes, reinterpret_cast<std::byte*>(buffer)}});
  }
  return made;
}

// True if all of it is over. What is left, of receives and of sends: null where nothing is. A refusal, if
// nothing has begun. None, if nothing has begun as C++ cannot take the array.
nb::object run_halo(const KnownHalo& self, nb::handle x, double seconds) {
  Py_buffer view;
  if (PyObject_GetBuffer(x.ptr(), &view, PyBUF_STRIDED) != 0) {
    PyErr_Clear();
    return nb::none();
  }
  auto* const array = static_cast<std::byte*>(view.buf);
  PyBuffer_Release(&view);
  std::vector<std::shared_ptr<PeerMessage>> rests;
  std::optional<Refusal> refusal;
  {
    nb::gil_scoped_release unlocked;
    refusal = self.run(array, nanoseconds(seconds), rests);
  }
  if (refusal) return nb::cast(*refusal);
  if (std::all_of(rests.begin(), rests.end(), [](const auto& rest) { return rest == nullptr; })) return nb::bool_(true);
  const auto middle = rests.begin() + static_cast<std::ptrdiff_t>(self.n_receives());
  return nb::make_tuple(std::vector(rests.begin(), middle), std::vector(middle, rests.end()));
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
      .def_prop_ro("pid", &NodeMemory::pid)
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

  nb::class_<MeetingPlace>(m, "MeetingPlace").def_prop_ro("index", &MeetingPlace::own_index);
  nb::class_<Team, MeetingPlace>(m, "Team")
      .def_prop_ro("size", &Team::size)
      .def("abandon", &Team::abandon, nb::call_guard<nb::gil_scoped_release>())
      .def("retire", &Team::retire);
  m.def("make_team", &Team::of, "index"_a, "context"_a, "is_crowded"_a, "memories"_a,
        "may_read"_a = true);

  nb::class_<WireTeam, MeetingPlace>(m, "WireTeam")
      .def(nb::new_([](const Runner& runner, std::vector<int> ranks, std::size_t index, int first_tag,
                       int tag_stride, std::size_t n_slots) {
             return std::make_shared<WireTeam>(runner.wire(), std::move(ranks), index, first_tag, tag_stride,
                                               n_slots);
           }),
           "runner"_a, "ranks"_a, "index"_a, "first_tag"_a, "tag_stride"_a, "n_slots"_a)
      .def_static("most_brought", &WireTeam::most_brought, "n"_a);

  nb::class_<CollectiveStep, Program>(m, "CollectiveStep")
      .def_prop_ro("agrees", &CollectiveStep::agrees)
      .def_prop_ro("is_whole", &CollectiveStep::is_whole)
      .def("has_arrived", &CollectiveStep::has_arrived, "member"_a)
      .def_prop_ro("quitter", &CollectiveStep::quitter)
      .def("drive", [](CollectiveStep& step, double seconds) { return step.drive(nanoseconds(seconds)); },
           Unlocked(), "seconds"_a)
      .def_prop_ro("moves", &CollectiveStep::moves)
      .def_prop_ro("is_to_choose", &CollectiveStep::is_to_choose)
      .def("shown",
           [](const CollectiveStep& self) {
             std::vector<std::tuple<nb::bytes, std::size_t>> all;
             for (const Shown& each : self.shown())
               all.emplace_back(nb::bytes(each.header.data(), each.header.size()), each.nbytes);
             return all;
           })
      .def("choose",
           [](CollectiveStep& self,
              const std::vector<std::tuple<std::size_t, std::size_t, Bytes>>& pulls) {
             self.choose(pulls_of(self.size(), pulls));
           },
           "pulls"_a);
  m.def("start_reduce", &start_reduce, "team"_a, "slot"_a, "fingerprint"_a, "source"_a.noconvert(),
        "target"_a.noconvert().none(), "bounds"_a, "to"_a, "root"_a, "op"_a, "dtype"_a, "divisor"_a,
        "is_widened"_a = false);
  nb::class_<KnownCall>(m, "KnownCall")
      .def("run", &run_known, "slot"_a, "source"_a.none(), "target"_a.none())
      .def("run_in_place", &run_known_in_place);  // arguments without names are found sooner
  nb::class_<KnownReduction, KnownCall>(m, "KnownReduction")
      .def("__init__",
           [](KnownReduction* self, std::shared_ptr<MeetingPlace> team, std::uint64_t fingerprint,
              std::size_t nbytes, std::vector<std::size_t> bounds, int to, std::size_t root, int op,
              int dtype, std::size_t divisor, double moment_s) {
             if (bounds.empty()) bounds = equal_bounds(nbytes, team->n_members());
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
           [](KnownCopy* self, std::shared_ptr<MeetingPlace> team, std::uint64_t fingerprint,
              const HeaderAndSize& mine,
              const std::vector<std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>>& parts,
              const std::vector<HeaderAndSize>& expected, double moment_s) {
             std::vector<KnownCopy::Part> pulls;
             for (const auto& [member, offset, nbytes, at] : parts)
               pulls.push_back({member, offset, nbytes, at});
             new (self) KnownCopy(std::move(team), fingerprint, shown_of(mine), std::move(pulls),
                                  all_shown_of(expected), nanoseconds(moment_s));
           },
           "team"_a, "fingerprint"_a, "mine"_a, "parts"_a, "expected"_a, "moment_s"_a);
  nb::class_<KnownSchedule, KnownCall>(m, "KnownSchedule")
      .def("__init__",
           [](KnownSchedule* self, std::shared_ptr<WireTeam> team, std::uint64_t fingerprint,
              const HeaderAndSize& mine, const std::vector<HeaderAndSize>& expected,
              std::shared_ptr<Runner> runner, std::shared_ptr<Schedule> schedule, std::vector<int> members,
              int first_tag, int tag_stride, double moment_s) {
             new (self) KnownSchedule(std::move(team), fingerprint, shown_of(mine), all_shown_of(expected),
                                      std::move(runner), std::move(schedule), std::move(members), first_tag,
                                      tag_stride, nanoseconds(moment_s));
           },
           "team"_a, "fingerprint"_a, "mine"_a, "expected"_a, "runner"_a, "schedule"_a, "members"_a,
           "first_tag"_a, "tag_stride"_a, "moment_s"_a);
  nb::class_<Places>(m, "Places").def(nb::init<>()).def("take", &Places::take);
  nb::class_<CopyStep, CollectiveStep>(m, "CopyStep").def_prop_ro("place", &CopyStep::place);
  m.def("start_copy", &start_copy, "team"_a, "slot"_a, "fingerprint"_a, "shown"_a.noconvert(),
        "pulls"_a.none(), "header"_a = nb::bytes("", 0), "places"_a.none() = nb::none(), "is_whole"_a = true);

  nb::class_<Refusal>(m, "Refusal")
      .def_ro("sender", &Refusal::sender)
      .def_ro("receiver", &Refusal::receiver)
      .def_ro("tag", &Refusal::tag)
      .def_ro("sent", &Refusal::sent)
      .def_ro("wanted", &Refusal::wanted)
      .def_ro("is_of_earlier", &Refusal::is_of_earlier);
  nb::class_<PeerMessages>(m, "PeerMessages")
      .def("__init__",
           [](PeerMessages* self, std::uint32_t rank,
              std::map<std::uint32_t, std::shared_ptr<NodeMemory>> memories, bool is_crowded,
              bool may_read, std::shared_ptr<Runner> runner, std::map<std::uint32_t, int> wire_ranks,
              std::tuple<int, int, int, std::size_t> tags) {
             WirePeers others;
             if (!wire_ranks.empty()) {
               if (runner == nullptr) throw std::invalid_argument("there is no wire");
               const auto [pipe_tag, first_tag, tag_stride, n_tags] = tags;
               if (n_tags == 0) throw std::invalid_argument("there are no tags");
               others = {runner->wire(), std::move(wire_ranks), pipe_tag, first_tag, tag_stride, n_tags};
             }
             new (self) PeerMessages(rank, std::move(memories), is_crowded ? kCrowded : kRoomy, may_read,
                                     std::move(others));
           },
           "rank"_a, "memories"_a, "is_crowded"_a, "may_read"_a, "runner"_a.none() = nb::none(),
           "wire_ranks"_a = std::map<std::uint32_t, int>(), "tags"_a = std::tuple<int, int, int, std::size_t>(0, 0, 0, 0))
      .def_prop_ro("reads_memory", &PeerMessages::reads_memory)
      .def_prop_ro("reading_error", &PeerMessages::reading_error)
      .def("unasked",
           [](PeerMessages& self, std::uint64_t group, std::size_t most) {
             std::vector<std::tuple<std::uint32_t, std::int64_t, std::string>> found;
             for (auto& [sender, tag, outline] : self.unasked(group, most))
               found.emplace_back(sender, tag, std::move(outline));
             return found;
           },
           "group"_a, "most"_a)
      .def("earlier_refusal", &PeerMessages::earlier_refusal, "rank"_a)
      .def_prop_ro("most_whole_by_wire", &PeerMessages::most_whole_by_wire)
      .def("close_wires",
           [](PeerMessages& self, double seconds) { self.close_wires(nanoseconds(seconds)); }, "seconds"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("retire", &PeerMessages::retire);
  nb::class_<PeerMessage, Program>(m, "PeerMessage")
      .def_prop_ro("source", &PeerMessage::source)
      .def_prop_ro("is_by_wire", &PeerMessage::is_by_wire)
      .def_prop_ro("waits_for_room", &PeerMessage::waits_for_room)
      .def_prop_ro("refusal", [](const PeerMessage& self) { return self.refusal(); })
      .def("drive",
           [](const std::shared_ptr<PeerMessage>& self, double seconds) {
             nb::gil_scoped_release unlocked;
             return self->drive_for(nanoseconds(seconds));
           },
           "seconds"_a);
  nb::class_<Correspondence>(m, "Correspondence")
      .def("__init__",
           [](Correspondence* self, std::shared_ptr<PeerMessages> messages,
              std::optional<std::uint32_t> rank, std::uint64_t group, nb::bytes outline,
              std::size_t nbytes) {
             new (self) Correspondence(correspondence(std::move(messages), rank, group, outline, nbytes));
           },
           "messages"_a, "rank"_a.none(), "group"_a, "outline"_a, "nbytes"_a)
      .def("send", &send_message, "x"_a.none(), "tag"_a.none(), "seconds"_a)
      .def("receive", &receive_message, "out"_a.none(), "tag"_a.none(), "seconds"_a);
  m.def("read_private",
        [](int pid, std::uint64_t place, Bytes out) {
          return read_private(pid, place, reinterpret_cast<std::byte*>(out.data()), out.nbytes());
        },
        "pid"_a, "place"_a, "out"_a.noconvert());
  nb::class_<KnownHalo>(m, "KnownHalo")
      .def("__init__",
           [](KnownHalo* self, std::shared_ptr<PeerMessages> messages, const HaloSides& sends,
              const HaloSides& receives) {
             new (self) KnownHalo(std::move(messages), halo_sides(sends), halo_sides(receives));
           },
           "messages"_a, "sends"_a, "receives"_a)
      .def("run", &run_halo, "x"_a, "seconds"_a);
  m.def("exchange_messages", &exchange_messages, "to"_a, "x"_a.none(), "sendtag"_a.none(),
        "source"_a, "out"_a.none(), "recvtag"_a.none(), "seconds"_a);

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
