#include <nanobind/nanobind.h>

#include <exception>
#include <system_error>

namespace ringcomm {
void bind_codec(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_pipe_endpoint(nanobind::module_& m);
void bind_ps(nanobind::module_& m);
void bind_hash_partition(nanobind::module_& m);
void bind_shard(nanobind::module_& m);
void bind_schedule(nanobind::module_& m);
void bind_shm(nanobind::module_& m);
void bind_status(nanobind::module_& m);
void bind_tensor_snapshot(nanobind::module_& m);
void bind_wire(nanobind::module_& m);
}  // namespace ringcomm

namespace {

// A system call that failed is OSError, with its errno, as in Python's own modules.
void as_os_error(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::system_error& error) {
    const nanobind::object args = nanobind::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, args.ptr());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  nanobind::register_exception_translator(as_os_error);
  nanobind::set_leak_warnings(false);  // the status page lives as long as its process, on purpose
  ringcomm::bind_codec(m);
  ringcomm::bind_kernels(m);
  ringcomm::bind_ps(m);
  ringcomm::bind_hash_partition(m);
  ringcomm::bind_shard(m);
  ringcomm::bind_schedule(m);
  ringcomm::bind_shm(m);
  ringcomm::bind_status(m);
  ringcomm::bind_tensor_snapshot(m);
  ringcomm::bind_wire(m);
  ringcomm::bind_pipe_endpoint(m);  // of programs, which are known by now
}
