// Bindings of the pipes between the ranks of a node.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_arrays.hpp"
#include "ps/pipe_endpoint.hpp"

namespace ringcomm {
namespace {

using ps::PipeEndpoint;

std::byte* pipe_memory(const NodeMemory& memory, std::size_t place, std::size_t nbytes) {
  std::byte* const at = memory.arena() + place;
  if (!memory.holds(at, nbytes) || place % 64 != 0 || nbytes % 64 != 0 ||
      nbytes <= 4 * sizeof(Pipe::Head))
    throw std::invalid_argument("that is no memory for a pipe");
  return at;
}

// mates: rank, its memory, where in this rank's memory it writes, where in its memory this rank does.
std::shared_ptr<PipeEndpoint> make_pipe_endpoint(
    std::uint32_t rank, std::shared_ptr<NodeMemory> memory, std::size_t nbytes,
    const std::vector<std::tuple<std::uint32_t, std::shared_ptr<NodeMemory>, std::size_t, std::size_t>>&
        mates,
    bool goes_on_alone, int looks, bool is_crowded, std::size_t inline_max, std::size_t meta_max) {
  std::vector<ps::Mate> peers;
  for (const auto& [mate, theirs, from_it, to_it] : mates)
    peers.push_back({mate, Pipe(pipe_memory(*theirs, to_it, nbytes), nbytes),
                     Pipe(pipe_memory(*memory, from_it, nbytes), nbytes), theirs});
  return std::make_shared<PipeEndpoint>(rank, std::move(memory), std::move(peers), goes_on_alone,
                                        looks, is_crowded ? kCrowded : kRoomy, inline_max, meta_max);
}

void clear_pipe(const std::shared_ptr<NodeMemory>& memory, std::size_t place, std::size_t nbytes) {
  Pipe(pipe_memory(*memory, place, nbytes), nbytes).clear();
}

// The bytes of a contiguous array, of whatever dtype.
class Whole {
 public:
  explicit Whole(nb::handle array) {
    if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  Whole(const Whole&) = delete;
  Whole& operator=(const Whole&) = delete;
  ~Whole() { PyBuffer_Release(&view_); }
  Chunk chunk() const { return {view_.buf, static_cast<std::size_t>(view_.len)}; }

 private:
  Py_buffer view_;
};

// The frame of a request, but for its meta and body; see ringcomm/ps/protocol/frames.py.
bool ask(PipeEndpoint& self, std::uint32_t rank, int kind, std::uint32_t view, std::uint32_t origin,
         std::uint64_t sequence, std::uint32_t table, std::uint32_t partition, std::int64_t clock,
         std::uint32_t option, std::uint64_t place, nb::bytes meta, nb::handle body) {
  ps::FrameHeader header{};
  header.kind = static_cast<ps::Kind>(kind);
  header.view = view;
  header.origin = origin;
  header.sequence = sequence;
  header.table = table;
  header.partition = partition;
  header.clock = clock;
  header.option = option;
  header.place = place;
  return self.ask(rank, header, {meta.c_str(), meta.size()}, Whole(body).chunk());
}

nb::list take_acks(PipeEndpoint& self) {
  nb::list acks;
  for (const auto& ack : self.take_acks()) acks.append(nb::make_tuple(ack.sequence, ack.clock));
  return acks;
}

nb::list collect(PipeEndpoint& self) {
  nb::list frames;
  for (const auto& [rank, frame] : self.collect())
    frames.append(nb::make_tuple(rank, nb::bytes(frame.data(), frame.size())));
  return frames;
}

}  // namespace

void bind_pipe_endpoint(nb::module_& m) {
  m.def("clear_pipe", &clear_pipe, "memory"_a, "place"_a, "nbytes"_a);
  m.def("make_pipe_endpoint", &make_pipe_endpoint, "rank"_a, "memory"_a, "nbytes"_a, "mates"_a,
        "goes_on_alone"_a, "looks"_a, "is_crowded"_a, "inline_max"_a, "meta_max"_a);
  nb::class_<ps::HomePushes>(m, "HomePushes")
      .def("lead", &ps::HomePushes::lead, "follower"_a.none())
      .def("follow", &ps::HomePushes::follow, "primary"_a)
      .def("next", &ps::HomePushes::next)
      .def_prop_ro("last", &ps::HomePushes::last)
      .def_prop_ro("n_under_way", &ps::HomePushes::n_under_way)
      .def_rw("is_kept", &ps::HomePushes::is_kept)
      .def_prop_ro("n_requests", &ps::HomePushes::n_requests)
      .def_prop_ro("n_body", &ps::HomePushes::n_body);
  nb::class_<PipeEndpoint, Program>(m, "PipeEndpoint")
      .def("reaches", &PipeEndpoint::reaches, "rank"_a)
      .def("send",
           [](PipeEndpoint& self, std::uint32_t rank, nb::bytes frame) {
             self.send(rank, frame.data(), frame.size());
           },
           "rank"_a, "frame"_a)
      .def("ask", &ask)
      .def("take_acks", &take_acks)
      .def("await_ack", &PipeEndpoint::await_ack, "sequence"_a, "limit_ns"_a, "taken"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("forget", &PipeEndpoint::forget, "rank"_a)
      .def_prop_ro("n_unsent", &PipeEndpoint::n_unsent)
      .def_prop_ro("has_frames", &PipeEndpoint::has_frames)
      .def("enter", &PipeEndpoint::enter, nb::call_guard<nb::gil_scoped_release>())
      .def("leave", &PipeEndpoint::leave)
      .def("collect", &collect)
      .def("hold", &PipeEndpoint::hold, "rank"_a)
      .def("open", &PipeEndpoint::open, "table"_a, "partition"_a, "epoch"_a, "block_updater"_a,
           "home"_a = nb::none())
      .def("begin_home", &PipeEndpoint::begin_home, "number"_a)
      .def("drop_home", &PipeEndpoint::drop_home, "number"_a)
      .def("complete", &PipeEndpoint::complete, "home"_a, "number"_a)
      .def("follow",
           [](PipeEndpoint& self, ps::HomePushes& home, nb::bytes meta, nb::handle body) {
             self.follow(home, {meta.c_str(), meta.size()}, Whole(body).chunk());
           },
           "home"_a, "meta"_a, "body"_a)
      .def("close", &PipeEndpoint::close, "table"_a, "partition"_a)
      .def_prop_ro("n_requests", [](const PipeEndpoint& self) { return self.n_requests.load(); })
      .def_prop_ro("n_body", [](const PipeEndpoint& self) { return self.n_body.load(); });
}

}  // namespace ringcomm
