// Bindings of the wires: what Python hands over to them, and the hub of ranks as threads.
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "bind_arrays.hpp"
#include "loop/run_schedule.hpp"
#include "wire/loopback.hpp"
#include "wire/mpi.hpp"

namespace ringcomm {
namespace {

std::unique_ptr<LoopbackMessage> loopback_send(LoopbackHub& hub, int rank, ConstBytes data,
                                               int dest, int tag) {
  return hub.send(rank, reinterpret_cast<const std::byte*>(data.data()), data.nbytes(), dest, tag);
}

std::unique_ptr<LoopbackMessage> loopback_receive(LoopbackHub& hub, int rank, Bytes out, int source,
                                                  int tag) {
  return hub.receive(rank, reinterpret_cast<std::byte*>(out.data()), out.nbytes(), source, tag);
}

}  // namespace

void bind_wire(nb::module_& m) {
  nb::exception<WireFault>(m, "WireFault").attr("__doc__") =
      "The wire refused an operation. A hint that a peer died; the dead set decides.";

  nb::class_<LoopbackMessage>(m, "LoopbackMessage")
      .def("start", &LoopbackMessage::start, Unlocked())
      .def("test", &LoopbackMessage::test)
      .def("cancel", &LoopbackMessage::cancel);

  // A message keeps its buffer alive.
  nb::class_<LoopbackHub>(m, "LoopbackHub")
      .def(nb::new_([](int size) { return std::make_shared<LoopbackHub>(size); }), "size"_a)
      .def("send", &loopback_send, nb::keep_alive<0, 3>(), "rank"_a, "data"_a.noconvert(),
           "dest"_a, "tag"_a)
      .def("receive", &loopback_receive, nb::keep_alive<0, 3>(), "rank"_a, "out"_a.noconvert(),
           "source"_a, "tag"_a)
      .def("runner", [](LoopbackHub& hub, int rank) {
        return std::make_shared<Runner>(hub.wire(rank));
      }, "rank"_a)
      .def("sleep", &LoopbackHub::sleep, Unlocked(), "rank"_a, "seconds"_a)
      .def("ring", &LoopbackHub::ring, Unlocked(), "rank"_a);

  m.attr("MPI_STATUS_MAX") = kMpiStatusMax;
  m.def("in_mpi_since", &in_mpi_since);
  m.def("mpi_runner", [](std::map<std::string, std::uintptr_t> functions,
                         std::size_t handle_nbytes, std::uint64_t byte, std::uint64_t comm,
                         std::size_t segment_nbytes) {
    const MpiLibrary library{std::move(functions), handle_nbytes, byte};
    return std::make_shared<Runner>(make_mpi_wire(library, comm, segment_nbytes));
  }, "functions"_a, "handle_nbytes"_a, "byte"_a, "comm"_a, "segment_nbytes"_a);
}

}  // namespace ringcomm
