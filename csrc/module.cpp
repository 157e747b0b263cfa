#include <nanobind/nanobind.h>

namespace ringcomm {
void bind_kernels(nanobind::module_& m);
void bind_status(nanobind::module_& m);
}  // namespace ringcomm

NB_MODULE(_core, m) {
  ringcomm::bind_kernels(m);
  ringcomm::bind_status(m);
}
