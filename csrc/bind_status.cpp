// Bindings of the status page, and of what a process needs to end well.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "status/end_after_python.hpp"
#include "status/page.hpp"
#include "status/stop_signals.hpp"
#include "status/pidfd.hpp"
#include "status/deadline_of_a_call.hpp"
#include "status/run_records.hpp"
#include "status/step_clock.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringcomm {
namespace {

// Valid text even from a page that was torn in mid-write.
nb::object text(const std::string& utf8) {
  return nb::steal(PyUnicode_DecodeUTF8(utf8.data(), static_cast<Py_ssize_t>(utf8.size()),
                                        "replace"));
}

// A path comes as bytes: as a str it may hold surrogates, which no std::string takes.
std::string path_of(const nb::bytes& path) { return {path.c_str(), path.size()}; }

nb::dict snapshot(const MappedPage& page) {
  const OpView op = page.op();
  const EndView end = page.end();
  nb::dict d;
  d["job"] = text(page->job);
  d["host"] = text(page->host);
  d["pid"] = page->pid;
  d["rank"] = page->rank;
  d["size"] = page->size;
  d["local_rank"] = page->local_rank;
  d["state"] = static_cast<int>(page->state.load());
  d["step"] = page->step.load();
  d["op_state"] = static_cast<int>(op.state);
  d["op_name"] = text(op.name);
  d["op_sequence"] = op.sequence;
  d["op_nbytes"] = op.nbytes;
  d["op_start_ns"] = op.start_ns;
  d["end_kind"] = static_cast<int>(end.kind);
  d["end_code"] = end.code;
  d["end_time_ns"] = end.time_ns;
  d["end_what"] = text(end.what);
  d["end_where"] = text(end.where);
  d["end_trace"] = text(end.trace);
  d["leaving_ns"] = page->leaving_ns.load();
  d["exit_code"] = page->exit_code.load();
  d["gone_ns"] = page->gone_ns.load();
  d["is_reported"] = page->is_reported.load() != 0;
  d["heartbeat_ns"] = page->heartbeat_ns.load();
  d["n_ended_ops"] = page->n_ended_ops.load();
  d["ended_nbytes"] = page->ended_nbytes.load();
  d["busy_ns"] = page->busy_ns.load();
  d["takes_commands"] = page->takes_commands.load() != 0;
  d["is_paused"] = page->is_paused.load() != 0;
  d["stacks_fd"] = page->stacks_fd.load();
  d["stacks_signal"] = page->stacks_signal.load();
  d["main_thread"] = page->main_thread.load();
  d["role"] = text(page->role);
  return d;
}

nb::list scalars(const MappedPage& page) {
  nb::list found;
  for (const ScalarView& s : page.scalars())
    found.append(nb::make_tuple(text(s.name), s.step, s.value, s.time_ns));
  return found;
}

nb::list events(const MappedPage& page) {
  nb::list found;
  for (const EventView& e : page.events()) found.append(nb::make_tuple(e.time_ns, text(e.text)));
  return found;
}

nb::list arrivals(const MappedPage& page) {
  nb::list found;
  for (const ArrivalView& a : page.arrivals())
    found.append(nb::make_tuple(a.sequence, text(a.name), a.nbytes, a.start_ns, a.end_ns));
  return found;
}

// The number of each step, its marks, and the times without a core.
nb::list steps(const MappedPage& page) {
  nb::list found;
  for (const StepView& s : page.steps()) {
    nb::list marks, no_core;
    for (const std::int64_t mark : s.marks_ns) marks.append(mark);
    for (const std::int64_t time : s.no_core_ns) no_core.append(time);
    found.append(nb::make_tuple(s.number, nb::tuple(marks), nb::tuple(no_core)));
  }
  return found;
}

// Py_AtExit: once Python is gone, and before the exit handlers of libraries that were loaded earlier.
void await_end_of_python() {
  static const bool is_registered = Py_AtExit(act_at_last) == 0;
  if (!is_registered) throw std::runtime_error("Python takes no more exit functions");
}

void end_with(LastAct act, int code) {
  await_end_of_python();
  set_last_act(act, code);
}

// Addresses of MPI's functions.
void finalize_mpi(std::uintptr_t finalize, std::uintptr_t finalized) {
  await_end_of_python();
  MpiEnd mpi{};
  mpi.finalize = reinterpret_cast<int (*)()>(finalize);
  mpi.finalized = reinterpret_cast<int (*)(int*)>(finalized);
  finalize_mpi_at_last(mpi);
}

}  // namespace

void bind_status(nb::module_& m) {
  nb::class_<MappedPage>(m, "StatusPage")
      .def_static("create", &MappedPage::create, "job"_a, "host"_a, "rank"_a, "size"_a,
                  "local_rank"_a, "nonce"_a)
      .def_static("open", &MappedPage::open, "pid"_a, "fd"_a, "nonce"_a)
      .def_static("look", &MappedPage::look, "pid"_a, "fd"_a)
      .def_prop_ro("fd", &MappedPage::fd)
      .def("close_fd", &MappedPage::close_fd)
      .def_static("adopt",
                  [](int fd, std::uint64_t nonce) {
                    return MappedPage::adopt(Descriptor(fd), nonce);
                  },
                  "fd"_a, "nonce"_a)
      .def_prop_ro("lifeline_fd", &MappedPage::lifeline_fd)
      .def("open_lifeline",
           [](const MappedPage& page, int pid) { return page.open_lifeline(pid).release(); }, "pid"_a)
      .def("snapshot", &snapshot)
      .def("set_state", [](MappedPage& page, int state) {
        page.set_state(from_code<State>("state", state));
      }, "state"_a)
      .def("set_step", [](MappedPage& page, std::uint64_t step) { page->step.store(step); },
           "step"_a)
      .def("begin_op", &MappedPage::begin_op, "name"_a, "sequence"_a, "nbytes"_a)
      .def("end_op", [](MappedPage& page, int state) { page.end_op(from_code<OpState>("state", state)); },
           "state"_a)
      .def("count_op", &MappedPage::count_op, "nbytes"_a)
      .def("log_scalar", &MappedPage::log_scalar, "name"_a, "step"_a, "value"_a)
      .def("scalars", &scalars)
      .def("note_event", &MappedPage::note_event, "text"_a)
      .def("events", &events)
      .def("arrivals", &arrivals)
      .def_static("look_to_ask", &MappedPage::look_to_ask, "pid"_a, "fd"_a)
      .def("take_mailbox", &MappedPage::take_mailbox, "pid"_a)
      .def("put_command", &MappedPage::put_command, "text"_a)
      .def("withdraw_command", &MappedPage::withdraw_command)
      .def("give_mailbox_back", &MappedPage::give_mailbox_back)
      .def_prop_ro("mail", [](const MappedPage& page) { return static_cast<int>(page.mail()); })
      .def_prop_ro("answer", [](const MappedPage& page) { return text(page.answer()); })
      .def_prop_ro("has_command", &MappedPage::has_command)
      .def("take_command", [](MappedPage& page) { return text(page.take_command()); })
      .def("answer_command", &MappedPage::answer_command, "text"_a)
      .def("note_takes_commands", [](MappedPage& page) { page->takes_commands.store(1); })
      .def("set_paused", [](MappedPage& page, bool is_paused) { page->is_paused.store(is_paused); },
           "is_paused"_a)
      .def("set_stacks",
           [](MappedPage& page, int fd, int signal, std::uint64_t main_thread) {
             page->main_thread.store(main_thread);
             page->stacks_fd.store(fd);
             page->stacks_signal.store(signal);
           },
           "fd"_a, "signal"_a, "main_thread"_a)
      .def("set_role", &MappedPage::set_role, "role"_a)
      .def("steps", &steps)
      .def("record_end",
           [](MappedPage& page, int kind, int code, const std::string& what,
              const std::string& where, const std::string& trace) {
             return page.record_end(from_code<Ending>("kind", kind), code, what, where, trace);
           },
           "kind"_a, "code"_a, "what"_a, "where"_a, "trace"_a)
      .def("wait_for_report",
           [](const MappedPage& page, double timeout_s) {
             nb::gil_scoped_release unlocked;
             wait_for_report(*page.get(), nanoseconds(timeout_s));
           },
           "timeout_s"_a)
      .def("record_this_process", [](MappedPage& page) { record_this_process(page.get()); });
  nb::class_<StepClock>(m, "StepClock")
      .def(nb::init<>())
      .def("mark", &StepClock::mark, "i"_a)
      .def("end", [](StepClock& clock, MappedPage& page) { clock.end(&page); }, "page"_a)
      .def("skip", [](StepClock& clock) { clock.end(nullptr); });
  m.def("record_this_rank_in", [](const nb::bytes& path) { record_this_rank_in(path_of(path)); },
        "path"_a);
  nb::class_<Watchdog>(m, "Watchdog")
      .def("__init__",
           [](Watchdog* self, double seconds, std::string message, const nb::bytes& news,
              double notice_s, std::string notice) {
             new (self) Watchdog(seconds, std::move(message), path_of(news), notice_s,
                                 std::move(notice));
           },
           "seconds"_a, "message"_a, "news"_a, "notice_s"_a, "notice"_a)
      .def("cancel", &Watchdog::cancel, nb::call_guard<nb::gil_scoped_release>());
  m.def("catch_stop_signals", &catch_stop_signals);
  m.def("stop_signal", &stop_signal);
  m.def("release_stop_signals", &release_stop_signals);
  m.def("let_forks_hold_stop_signals", &let_forks_hold_stop_signals);
  m.def("hold_stop_signals_of", &hold_stop_signals_of, "rank"_a);
  m.def("hold_stop_signals_again", &hold_stop_signals_again);
  m.def("pass_stop_signals_on", &pass_stop_signals_on);
  m.def("exit_at_last", [](int code) { end_with(LastAct::exit, code); }, "code"_a);
  m.def("kill_at_last", [] { end_with(LastAct::kill, 0); });
  m.def("finalize_mpi_at_last", &finalize_mpi, "finalize"_a, "finalized"_a);
  m.def("monotonic_ns", &monotonic_ns);
  m.def("open_pidfd", [](int pid) { return open_pidfd(pid).release(); }, "pid"_a);
}

}  // namespace ringcomm
