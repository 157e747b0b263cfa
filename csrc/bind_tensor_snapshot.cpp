// Notices what a program does to tensors between two moments, at the cost of no Python code.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace ringcomm {
namespace {

constexpr std::size_t kPieces = 16, kPiece = 1024;  // bytes; of a larger tensor this is read

// Names of attributes, made once: they live as long as the process.
PyObject* name(const char* text) {
  PyObject* made = PyUnicode_InternFromString(text);
  if (made == nullptr) nb::raise_python_error();
  return made;
}

nb::object attribute(PyObject* x, PyObject* which) {
  PyObject* found = PyObject_GetAttr(x, which);
  if (found == nullptr) nb::raise_python_error();
  return nb::steal(found);
}

// PyObject_CallMethodNoArgs, which the stable ABI of Python 3.12 lacks.
PyObject* try_call(PyObject* x, PyObject* method) {
  return PyObject_VectorcallMethod(method, &x, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

nb::object call(PyObject* x, PyObject* method) {
  PyObject* result = try_call(x, method);
  if (result == nullptr) nb::raise_python_error();
  return nb::steal(result);
}

std::uint64_t number(const nb::object& x) {
  const std::uint64_t value = PyLong_AsUnsignedLongLong(x.ptr());
  if (value == static_cast<std::uint64_t>(-1) && PyErr_Occurred() != nullptr)
    nb::raise_python_error();
  return value;
}

// Asks tensors of torch, which this file does not link with, by the names of their attributes.
struct Names {
  PyObject *version = name("_version"), *data_ptr = name("data_ptr"), *nbytes = name("nbytes"),
           *is_contiguous = name("is_contiguous"), *detach = name("detach"),
           *contiguous = name("contiguous");

  static const Names& get() {
    static const Names names;
    return names;
  }
};

// The address of the first element; 0 if a tensor is missing, empty or sparse.
std::uintptr_t address_of(PyObject* x) {
  PyObject* address = try_call(x, Names::get().data_ptr);
  if (address == nullptr) {  // sparse tensors have none
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) nb::raise_python_error();
    PyErr_Clear();
    return 0;
  }
  return static_cast<std::uintptr_t>(number(nb::steal(address)));
}

// Calls f(address, nbytes) for each part of contiguous elements that is read in this turn.
template <typename F>
void for_each_piece(std::uintptr_t address, std::size_t nbytes, std::size_t turn, F f) {
  if (nbytes <= kPieces * kPiece) return f(address, nbytes);
  const std::size_t step = nbytes / kPieces;
  const std::uintptr_t first = address + turn * kPiece % (step - kPiece + 1);
  for (std::size_t k = 0; k < kPieces; ++k) f(first + k * step, kPiece);
}

// Tensors at one moment, to notice which of them the program exchanges, writes to or moves.
//
// It keeps them alive until forget(). torch counts writes to a tensor, but not those through .data:
// of these it notices the ones to its samples, which are all elements of a tensor of up to 16 KiB;
// of a larger one 16 pieces of 1 KiB at equal distances.
class TensorSnapshot {
 public:
  // attribute: the tensors are this attribute of the objects that are passed, such as "grad".
  explicit TensorSnapshot(const std::optional<std::string>& attribute)
      : attribute_(attribute ? nb::steal(name(attribute->c_str())) : nb::object()) {}

  // Takes note of tensors as they are now; one may be None. turn: of a larger tensor other pieces
  // are read in each turn; without it there are no samples.
  void take(nb::list tensors, std::optional<std::size_t> turn) {
    forget();
    const Names& names = Names::get();
    std::vector<Known> known;
    known.reserve(tensors.size());
    samples_.clear();
    for (nb::handle each : tensors) {
      Known& x = known.emplace_back(seen(each));
      if (!turn || x.address == 0) continue;
      x.nbytes = number(attribute(x.tensor.ptr(), names.nbytes));
      x.is_contiguous = call(x.tensor.ptr(), names.is_contiguous).is(nb::handle(Py_True));
      x.is_read = true;
      read(x, *turn, [this](std::uintptr_t from, std::size_t n) {
        const char* bytes = reinterpret_cast<const char*>(from);
        samples_.insert(samples_.end(), bytes, bytes + n);
      });
    }
    known_ = std::move(known);
    turn_ = turn;
    is_taken_ = true;
  }

  // Keeps no tensors: changed() finds nothing until take().
  void forget() {
    is_taken_ = false;
    const std::vector<Known> gone = std::exchange(known_, {});  // what their end calls may come here
  }

  bool is_taken() const { return is_taken_; }

  // Returns the place of the first tensor that is another one or has changed. is_thorough: compares
  // the samples, too.
  std::optional<std::size_t> changed(nb::list tensors, bool is_thorough) const {
    if (!is_taken_) return std::nullopt;
    if (tensors.size() != known_.size())
      throw std::invalid_argument("changed(): " + std::to_string(tensors.size()) +
                                  " tensors; take() got " + std::to_string(known_.size()));
    for (std::size_t k = 0; k < known_.size(); ++k)
      if (!(seen(tensors[k]) == known_[k])) return k;
    if (!turn_ || !is_thorough) return std::nullopt;
    const char* before = samples_.data();
    for (std::size_t k = 0; k < known_.size(); ++k) {
      bool is_equal = true;
      if (known_[k].is_read)
        read(known_[k], *turn_, [&](std::uintptr_t from, std::size_t n) {
          is_equal = is_equal && std::memcmp(reinterpret_cast<const char*>(from), before, n) == 0;
          before += n;
        });
      if (!is_equal) return k;
    }
    return std::nullopt;
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Known& x : known_) Py_VISIT(x.tensor.ptr());
    return 0;
  }

 private:
  struct Known {
    nb::object tensor;
    std::uint64_t version = 0;
    std::uintptr_t address = 0;
    std::size_t nbytes = 0;
    bool is_contiguous = false, is_read = false;

    bool operator==(const Known& other) const {
      return tensor.is(other.tensor) && version == other.version && address == other.address;
    }
  };

  Known seen(nb::handle each) const {
    Known x{attribute_.is_valid() ? attribute(each.ptr(), attribute_.ptr()) : nb::borrow(each)};
    if (x.tensor.is_none()) return x;
    x.version = number(attribute(x.tensor.ptr(), Names::get().version));
    x.address = address_of(x.tensor.ptr());
    return x;
  }

  template <typename F>
  static void read(const Known& x, std::size_t turn, F f) {
    if (x.is_contiguous) return for_each_piece(x.address, x.nbytes, turn, f);
    const Names& names = Names::get();  // a copy of the elements; it lives until they are read
    const nb::object copy = call(call(x.tensor.ptr(), names.detach).ptr(), names.contiguous);
    for_each_piece(address_of(copy.ptr()), x.nbytes, turn, f);
  }

  nb::object attribute_;
  std::vector<Known> known_;
  std::vector<char> samples_;
  std::optional<std::size_t> turn_;
  bool is_taken_ = false;
};

// Parameters may own, by their hooks, what owns the snapshot: Python finds such circles.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<TensorSnapshot>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
  nb::inst_ptr<TensorSnapshot>(self)->forget();
  return 0;
}

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {0, nullptr}};

}  // namespace

void bind_tensor_snapshot(nb::module_& m) {
  nb::class_<TensorSnapshot>(m, "TensorSnapshot", nb::type_slots(slots))
      .def(nb::init<const std::optional<std::string>&>(), "attribute"_a = nb::none())
      .def("take", &TensorSnapshot::take, "tensors"_a, "turn"_a = nb::none())
      .def("forget", &TensorSnapshot::forget)
      .def_prop_ro("is_taken", &TensorSnapshot::is_taken)
      .def("changed", &TensorSnapshot::changed, "tensors"_a, "is_thorough"_a = true);
}

}  // namespace ringcomm
