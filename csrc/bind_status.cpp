// Bindings of the status page.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>

#include "status/page.hpp"
#include "status/watchdog.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringcomm {
namespace {

nb::dict snapshot(const MappedPage& page) {
  const OpView op = page.op();
  const EndView end = page.end();
  nb::dict d;
  d["job"] = std::string(page->job);
  d["host"] = std::string(page->host);
  d["pid"] = page->pid;
  d["rank"] = page->rank;
  d["size"] = page->size;
  d["local_rank"] = page->local_rank;
  d["state"] = static_cast<int>(page->state.load());
  d["step"] = page->step.load();
  d["op_state"] = static_cast<int>(op.state);
  d["op_name"] = op.name;
  d["op_sequence"] = op.sequence;
  d["op_nbytes"] = op.nbytes;
  d["op_start_ns"] = op.start_ns;
  d["end_kind"] = static_cast<int>(end.kind);
  d["end_code"] = end.code;
  d["end_time_ns"] = end.time_ns;
  d["end_what"] = end.what;
  d["end_where"] = end.where;
  d["end_trace"] = end.trace;
  d["leaving_ns"] = page->leaving_ns.load();
  d["exit_code"] = page->exit_code.load();
  d["gone_ns"] = page->gone_ns.load();
  return d;
}

void set_state(MappedPage& page, int state) {
  const auto next = static_cast<State>(state);
  if (next == State::leaving) page->leaving_ns.store(now_ns());
  page->state.store(next);
}

}  // namespace

void bind_status(nb::module_& m) {
  nb::class_<MappedPage>(m, "StatusPage")
      .def_static("create", &MappedPage::create, "job"_a, "host"_a, "rank"_a, "size"_a,
                  "local_rank"_a, "nonce"_a)
      .def_static("open", &MappedPage::open, "pid"_a, "fd"_a, "nonce"_a)
      .def_prop_ro("fd", &MappedPage::fd)
      .def("snapshot", &snapshot)
      .def("set_state", &set_state, "state"_a)
      .def("set_step", [](MappedPage& page, std::uint64_t step) { page->step.store(step); },
           "step"_a)
      .def("begin_op", &MappedPage::begin_op, "name"_a, "sequence"_a, "nbytes"_a)
      .def("end_op", [](MappedPage& page, int state) { page.end_op(static_cast<OpState>(state)); },
           "state"_a)
      .def("record_end",
           [](MappedPage& page, int kind, int code, const std::string& what,
              const std::string& where, const std::string& trace) {
             return page.record_end(static_cast<Ending>(kind), code, what, where, trace);
           },
           "kind"_a, "code"_a, "what"_a, "where"_a, "trace"_a)
      .def("wait_for_report",
           [](const MappedPage& page, double timeout_s) {
             nb::gil_scoped_release unlocked;
             wait_for_report(*page.get(), static_cast<std::int64_t>(timeout_s * 1e9));
           },
           "timeout_s"_a)
      .def("record_this_process", [](MappedPage& page) { record_this_process(page.get()); });
  nb::class_<Watchdog>(m, "Watchdog")
      .def(nb::init<double, std::string>(), "seconds"_a, "message"_a)
      .def("cancel", &Watchdog::cancel, nb::call_guard<nb::gil_scoped_release>());
  m.def("monotonic_ns", &now_ns);
}

}  // namespace ringcomm
