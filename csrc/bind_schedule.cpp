// Bindings of schedules: Python records them, and hands buffers over to run them.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind_arrays.hpp"
#include "loop/loop.hpp"
#include "loop/run_schedule.hpp"

namespace ringcomm {
namespace {

using PySpan = std::tuple<std::size_t, std::size_t, std::size_t>;  // buffer, offset, nbytes

Span span(const PySpan& of) { return {std::get<0>(of), std::get<1>(of), std::get<2>(of)}; }

std::vector<Span> spans(const std::vector<PySpan>& of) {
  std::vector<Span> all;
  for (const PySpan& each : of) all.push_back(span(each));
  return all;
}

// Arrays may be read-only: a schedule writes to what its algorithm writes to.
std::shared_ptr<Run> py_run(Runner& runner, std::shared_ptr<const Schedule> schedule,
                            const std::vector<ConstBytes>& arguments, std::vector<int> members,
                            int tag, bool keeps_time) {
  Bindings bindings{{}, std::move(members), tag};
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (i < schedule->n_arguments() && arguments[i].nbytes() != schedule->buffers()[i])
      throw std::invalid_argument("argument " + std::to_string(i) + " has " +
                                  std::to_string(arguments[i].nbytes()) + " bytes, not " +
                                  std::to_string(schedule->buffers()[i]));
    bindings.arguments.push_back(const_cast<std::byte*>(
        reinterpret_cast<const std::byte*>(arguments[i].data())));
  }
  return runner.run(std::move(schedule), std::move(bindings), keeps_time);
}

using PyPhase = std::tuple<std::string, std::int64_t, std::int64_t>;  // name, begin and end in ns

std::vector<PyPhase> phases(const Run& run) {
  std::vector<PyPhase> all;
  for (const Phase& each : run.phases())
    all.emplace_back(each.name, each.begin_ns, each.end_ns);
  return all;
}

}  // namespace

void bind_schedule(nb::module_& m) {
  nb::class_<Schedule>(m, "Schedule")
      .def(nb::new_([](std::vector<std::size_t> arguments_nbytes) {
             return std::make_shared<Schedule>(std::move(arguments_nbytes));
           }),
           "arguments_nbytes"_a)
      .def("add_scratch", &Schedule::add_scratch, "nbytes"_a)
      .def("send", [](Schedule& s, PySpan data, int dest) { return s.send(span(data), dest); },
           "data"_a, "dest"_a)
      .def("receive", [](Schedule& s, PySpan out, int source) {
        return s.receive(span(out), source);
      }, "out"_a, "source"_a)
      .def("wait", &Schedule::wait, "messages"_a)
      .def("combine", [](Schedule& s, PySpan total, PySpan x, int dtype, int op) {
        s.combine(span(total), span(x), from_code<DType>("dtype", dtype), from_code<Op>("op", op));
      }, "total"_a, "x"_a, "dtype"_a, "op"_a)
      .def("combine_at_once", [](Schedule& s, PySpan out, const std::vector<PySpan>& sources,
                                 int dtype, int op, std::size_t divisor) {
        s.combine_at_once(span(out), spans(sources), from_code<DType>("dtype", dtype),
                          from_code<Op>("op", op), divisor);
      }, "out"_a, "sources"_a, "dtype"_a, "op"_a, "divisor"_a)
      .def("divide", [](Schedule& s, PySpan total, int dtype, std::size_t divisor) {
        s.divide(span(total), from_code<DType>("dtype", dtype), divisor);
      }, "total"_a, "dtype"_a, "divisor"_a)
      .def("copy", [](Schedule& s, PySpan out, PySpan x) { s.copy(span(out), span(x)); }, "out"_a,
           "x"_a)
      .def("finish", &Schedule::finish);

  nb::class_<Program>(m, "Program")
      .def("advance", [](Program& p) { return p.advance() == Program::Step::moved; }, Unlocked())
      .def("abandon", &Program::abandon, Unlocked())
      .def("drive", [](Program& p, double seconds) {
        return drive_polling(p, nanoseconds(seconds));
      }, Unlocked(), "seconds"_a)
      .def_prop_ro("is_over", &Program::is_over)
      .def_prop_ro("fault", &Program::fault);

  nb::class_<Run, Program>(m, "Run").def_prop_ro("moves", &Run::moves)
      .def("phases", &phases);

  nb::class_<Runner>(m, "Runner")
      .def("run", &py_run, "schedule"_a, "arguments"_a.noconvert(), "members"_a, "tag"_a,
           "keeps_time"_a = false)
      .def("close", &Runner::close, Unlocked())
      .def_prop_ro("n_idle", &Runner::n_idle)
      .def_prop_ro("idle_nbytes", &Runner::idle_nbytes);
}

}  // namespace ringcomm
