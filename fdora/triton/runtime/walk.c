/* Runs a plan: allocates its results, fills in pointers and launches, without coming back to Python in between.

   facts(tensors)   -> bytes: shapes, strides, dtypes, devices and alignment, a key for plans; None where a tensor is not a plain one
   places(references) -> (tensors, key, versions), the key with addresses
   Program(...)     -> a plan whose kernels are compiled; program.run(tensors, scalars, stream) -> its results

   native.py compiles this file, behind plain.c, with the compiler that Triton uses for its own launchers, and builds Programs. Every address
   of the driver and of cuBLAS comes in through setup(), so the tests can put recorders in their places. A Program is never
   written to while it runs: each run works on a copy of the arguments on its own stack, so threads do not meet. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* ---- the ABI of others, as much of it as is used ---- */

typedef struct { int32_t type, id; } Device;                                        /* DLPack 1 */
typedef struct { void *data; Device device; int32_t ndim; struct { uint8_t code, bits; uint16_t lanes; } dtype;
                 int64_t *shape, *strides; uint64_t byte_offset; } Tensor;
typedef struct { struct { uint32_t major, minor; } version; void *previous;
                 void *allocate, *from_object, *to_object;
                 int (*borrow)(void *, Tensor *);
                 void *current_stream; } Exchange;

typedef struct { uint32_t id, pad; union { char room[64]; int32_t flag; } value; } Attribute; /* cuda.h */
typedef struct { uint32_t grid[3], block[3], shared; void *stream; Attribute *attributes; uint32_t count; } LaunchConfig;
enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
typedef int (*LaunchKernel)(const LaunchConfig *, void *function, void **params, void **extra);
typedef int (*ReplaceAddress)(void *map, void *address);
typedef int (*Gemm)(void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int type_a, int lda,
                    const void *b, int type_b, int ldb, const void *beta, void *c, int type_c, int ldc, int compute, int algorithm);

static Exchange *exchange;
static LaunchKernel launch_kernel;
static ReplaceAddress replace_address;
static Gemm gemm_ex;
static PyObject *empty, *blas_handle, *enter_context, *tensor_type, *parameter_type;
enum { NO_CONTEXT = 201 }; /* of CUDA: a thread of autograd has none before something of the runtime ran there */

/* ---- facts ---- */

enum { MAX_TENSORS = 96, MAX_SCALARS = 16 };

static int borrow(PyObject *object, Tensor *out) {
    if ((PyObject *)Py_TYPE(object) != tensor_type && (PyObject *)Py_TYPE(object) != parameter_type) return -1;
    if (exchange->borrow(object, out)) { PyErr_Clear(); return -1; }
    return 0;
}

static PyObject *facts(PyObject *self, PyObject *tensors) {
    int64_t few[MAX_TENSORS * 8], *key = few, *many = NULL;
    Py_ssize_t at = 0, room = MAX_TENSORS * 8;
    if (!PyTuple_CheckExact(tensors)) { PyErr_SetString(PyExc_TypeError, "facts wants a tuple of tensors and None"); return NULL; }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
        PyObject *object = PyTuple_GET_ITEM(tensors, i);
        Tensor t = {0};
        if (object != Py_None && borrow(object, &t)) { PyMem_Free(many); Py_RETURN_NONE; }
        if (at + 2 + 2 * t.ndim > room) {
            room = 2 * (at + 2 + 2 * t.ndim);
            int64_t *wider = PyMem_Realloc(many, 8 * room);
            if (!wider) { PyMem_Free(many); return PyErr_NoMemory(); }
            if (!many) memcpy(wider, few, 8 * at);
            key = many = wider;
        }
        if (object == Py_None) { key[at++] = -1; continue; }
        int aligned = (((uintptr_t)t.data + t.byte_offset) & 15) == 0;
        key[at++] = (int64_t)t.ndim | (int64_t)t.dtype.code << 8 | (int64_t)t.dtype.bits << 16 | (int64_t)aligned << 32
                    | (int64_t)t.device.type << 40;
        key[at++] = t.device.id;
        memcpy(key + at, t.shape, 8 * t.ndim);
        at += t.ndim;
        memcpy(key + at, t.strides, 8 * t.ndim);
        at += t.ndim;
    }
    PyObject *bytes = PyBytes_FromStringAndSize((char *)key, 8 * at);
    PyMem_Free(many);
    return bytes;
}

/* (tensors, key, versions) of a tuple of weak references: the key has their facts and addresses. None where one is gone. */
static PyObject *places(PyObject *self, PyObject *references) {
    if (!PyTuple_CheckExact(references) || !intern()) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "places wants a tuple of references");
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(references);
    PyObject *tensors = PyTuple_New(n), *versions = PyTuple_New(n), *key = NULL, *out = NULL;
    void **at = PyMem_Malloc(sizeof(void *) * (n + 1));
    int whole = tensors && versions && at;
    for (Py_ssize_t i = 0; whole && i < n; i++) {
        Tensor t;
        PyObject *tensor = PyObject_CallNoArgs(PyTuple_GET_ITEM(references, i)), *version = NULL;
        whole = tensor && tensor != Py_None && !borrow(tensor, &t) && (version = PyObject_GetAttr(tensor, names[VERSION]));
        if (whole) {
            at[i] = (char *)t.data + t.byte_offset;
            PyTuple_SET_ITEM(tensors, i, Py_NewRef(tensor));
            PyTuple_SET_ITEM(versions, i, version);
        }
        Py_XDECREF(tensor);
    }
    if (whole && (key = facts(self, tensors)) && PyBytes_Check(key)) {
        PyObject *addresses = PyBytes_FromStringAndSize((char *)at, sizeof(void *) * n);
        if (addresses) PyBytes_ConcatAndDel(&key, addresses);
        out = addresses && key ? PyTuple_Pack(3, tensors, key, versions) : NULL;
    }
    PyMem_Free(at);
    Py_XDECREF(tensors); Py_XDECREF(versions); Py_XDECREF(key);
    if (out || PyErr_Occurred()) return out;
    Py_RETURN_NONE;
}

/* ---- programs ---- */

enum { POINTER, SCALAR, MAP };
typedef struct { int kind, slot; int64_t offset; uint32_t at; } Patch;                /* SCALAR: slot is the scalar's number */
typedef struct { void *function; uint32_t grid[3], threads, shared; int pdl; int first, params; } Launch;
typedef struct { int ta, tb, m, n, k, alpha, accumulate, lda, ldb, ldc, type_a, type_b, type_c, compute;
                 int slot[3]; int64_t offset[3]; } Product;
typedef struct { int is_product; union { Launch launch; Product product; }; } Step;

typedef struct {
    PyObject_HEAD
    int inputs, scalars, results, steps, patches, products;
    int64_t workspace;
    PyObject *allocations, *workspace_size, *workspace_stride, *byte; /* ((size, stride, dtype), ...); (n,), (1,), uint8 */
    Step *step;
    Patch *patch;
    uint32_t *param;                                                  /* where in the blob each parameter of each launch lies */
    char *blob;
    uint32_t blob_size;
    PyObject *kernels;                                                /* whatever must live as long as their functions are used */
} Program;

static void program_dealloc(Program *self) {
    Py_XDECREF(self->allocations); Py_XDECREF(self->workspace_size); Py_XDECREF(self->workspace_stride);
    Py_XDECREF(self->byte); Py_XDECREF(self->kernels);
    free(self->step); free(self->patch); free(self->param); free(self->blob);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static uint32_t append(Program *self, const void *bytes, uint32_t size, uint32_t align) {
    uint32_t at = (self->blob_size + align - 1) / align * align;
    self->blob_size = at + size;
    if (self->blob) memcpy(self->blob + at, bytes, size);
    return at;
}

/* One parameter: bytes (a constant) | (slot, offset), a pointer | (number,), a float32 scalar | (bytes, slot, offset), a tensor map. */
static int add_param(Program *self, PyObject *spec, uint32_t *at, int *patches) {
    static const char zero[128];
    if (PyBytes_Check(spec)) {
        uint32_t size = (uint32_t)PyBytes_GET_SIZE(spec);
        *at = append(self, PyBytes_AS_STRING(spec), size, size);
        return 0;
    }
    if (!PyTuple_Check(spec)) { PyErr_SetString(PyExc_TypeError, "a parameter is bytes or a tuple"); return -1; }
    Patch p = {0};
    if (PyTuple_GET_SIZE(spec) == 1) {
        p.kind = SCALAR;
        p.slot = (int)PyLong_AsLong(PyTuple_GET_ITEM(spec, 0));
        p.at = *at = append(self, zero, 4, 4);
    } else if (PyTuple_GET_SIZE(spec) == 2) {
        p.kind = POINTER;
        if (!PyArg_ParseTuple(spec, "iL", &p.slot, &p.offset)) return -1;
        p.at = *at = append(self, zero, 8, 8);
    } else {
        const char *map; Py_ssize_t size;
        p.kind = MAP;
        if (!PyArg_ParseTuple(spec, "y#iL", &map, &size, &p.slot, &p.offset)) return -1;
        if (size != 128) { PyErr_SetString(PyExc_ValueError, "a tensor map has 128 bytes"); return -1; }
        p.at = *at = append(self, map, 128, 64);
    }
    if (self->patch) self->patch[*patches] = p;
    ++*patches;
    return PyErr_Occurred() ? -1 : 0;
}

/* Walks the steps twice: to count, then to fill what was allocated for that many. */
static int read_steps(Program *self, PyObject *steps) {
    int patches = 0, params = 0;
    self->blob_size = 0;
    self->products = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); i++) {
        PyObject *spec = PyTuple_GET_ITEM(steps, i);
        Step s = {0};
        if (!PyTuple_Check(spec)) { PyErr_SetString(PyExc_TypeError, "a step is a tuple"); return -1; }
        if (PyTuple_GET_SIZE(spec) == 8) {
            unsigned long long function;
            PyObject *list;
            if (!PyArg_ParseTuple(spec, "KIIIIIpO!", &function, &s.launch.grid[0], &s.launch.grid[1], &s.launch.grid[2],
                                  &s.launch.threads, &s.launch.shared, &s.launch.pdl, &PyTuple_Type, &list)) return -1;
            s.launch.function = (void *)(uintptr_t)function;
            s.launch.first = params;
            s.launch.params = (int)PyTuple_GET_SIZE(list);
            for (int j = 0; j < s.launch.params; j++, params++) {
                uint32_t at;
                if (add_param(self, PyTuple_GET_ITEM(list, j), &at, &patches)) return -1;
                if (self->param) self->param[params] = at;
            }
        } else {
            Product *p = &s.product;
            s.is_product = 1;
            self->products++;
            if (!PyArg_ParseTuple(spec, "(iiiiiiiiiiiiii)(iL)(iL)(iL)", &p->ta, &p->tb, &p->m, &p->n, &p->k, &p->alpha, &p->accumulate,
                                  &p->lda, &p->ldb, &p->ldc, &p->type_a, &p->type_b, &p->type_c, &p->compute,
                                  &p->slot[0], &p->offset[0], &p->slot[1], &p->offset[1], &p->slot[2], &p->offset[2])) return -1;
        }
        if (self->step) self->step[i] = s;
    }
    if (!self->step) {
        self->steps = (int)PyTuple_GET_SIZE(steps);
        self->patches = patches;
        self->step = calloc(self->steps + 1, sizeof(Step));
        self->patch = calloc(patches + 1, sizeof(Patch));
        self->param = calloc(params + 1, sizeof(uint32_t));
        self->blob = calloc(self->blob_size + 1, 1);
        if (!self->step || !self->patch || !self->param || !self->blob) { PyErr_NoMemory(); return -1; }
        return read_steps(self, steps);
    }
    return 0;
}

static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int inputs, scalars;
    long long workspace;
    PyObject *allocations, *steps, *kernels, *byte;
    if (!PyArg_ParseTuple(args, "iiO!LO!OO", &inputs, &scalars, &PyTuple_Type, &allocations, &workspace, &PyTuple_Type, &steps, &kernels, &byte))
        return NULL;
    if (inputs + PyTuple_GET_SIZE(allocations) + 1 > MAX_TENSORS || scalars > MAX_SCALARS) {
        PyErr_SetString(PyExc_ValueError, "too many tensors or scalars");
        return NULL;
    }
    Program *self = (Program *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->inputs = inputs;
    self->scalars = scalars;
    self->results = (int)PyTuple_GET_SIZE(allocations);
    self->workspace = workspace;
    Py_INCREF(allocations); self->allocations = allocations;
    Py_INCREF(kernels); self->kernels = kernels;
    Py_INCREF(byte); self->byte = byte;
    self->workspace_size = Py_BuildValue("(L)", workspace);
    self->workspace_stride = Py_BuildValue("(i)", 1);
    if (!self->workspace_size || !self->workspace_stride || read_steps(self, steps)) { Py_DECREF(self); return NULL; }
    return (PyObject *)self;
}

static int address(PyObject *object, char **out) {
    Tensor t;
    if (exchange->borrow(object, &t)) return -1;
    *out = (char *)t.data + t.byte_offset;
    return 0;
}

static int launch(const Launch *l, const Program *self, char *blob, void *stream) {
    void *params[l->params + 1];
    for (int i = 0; i < l->params; i++) params[i] = blob + self->param[l->first + i];
    Attribute attribute = {PROGRAMMATIC_STREAM_SERIALIZATION, 0, {{0}}};
    attribute.value.flag = 1;
    LaunchConfig config = {{l->grid[0], l->grid[1], l->grid[2]}, {l->threads, 1, 1}, l->shared, stream, &attribute, l->pdl ? 1 : 0};
    return launch_kernel(&config, l->function, params, NULL);
}

static int product(const Product *p, char **base, const float *scalars, void *handle) {
    float alpha = p->alpha < 0 ? 1.0f : scalars[p->alpha], beta = p->accumulate ? 1.0f : 0.0f;
    return gemm_ex(handle, p->ta, p->tb, p->m, p->n, p->k, &alpha, base[p->slot[0]] + p->offset[0], p->type_a, p->lda,
                   base[p->slot[1]] + p->offset[1], p->type_b, p->ldb, &beta, base[p->slot[2]] + p->offset[2], p->type_c, p->ldc,
                   p->compute, -1);
}

static PyObject *program_run(Program *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyTuple_CheckExact(args[0]) || !PyTuple_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "run wants a tuple of tensors, a tuple of scalars and a stream");
        return NULL;
    }
    PyObject *tensors = args[0], *scalars = args[1];
    void *stream = PyLong_AsVoidPtr(args[2]);
    if (PyTuple_GET_SIZE(tensors) != self->inputs) { PyErr_SetString(PyExc_ValueError, "another number of tensors"); return NULL; }
    char *slots[MAX_TENSORS + 1] = {NULL}, **base = slots + 1; /* base[-1] is the workspace */
    float values[MAX_SCALARS];
    int n = 0;
    for (int i = 0; i < self->inputs; i++, n++) {
        PyObject *object = PyTuple_GET_ITEM(tensors, i);
        if (object == Py_None) base[n] = NULL;
        else if (address(object, &base[n])) return NULL;
    }
    if (PyTuple_GET_SIZE(scalars) != self->scalars) { PyErr_SetString(PyExc_ValueError, "another number of scalars"); return NULL; }
    for (int i = 0; i < self->scalars; i++) values[i] = (float)PyFloat_AsDouble(PyTuple_GET_ITEM(scalars, i));
    if (PyErr_Occurred()) return NULL;

    PyObject *out = PyTuple_New(self->results), *workspace = NULL;
    void *handle = NULL;
    if (!out) return NULL;
    for (int i = 0; i < self->results; i++, n++) {
        PyObject *spec = PyTuple_GET_ITEM(self->allocations, i);
        PyObject *made = PyObject_Vectorcall(empty, &PyTuple_GET_ITEM(spec, 0), 3, NULL);
        if (!made) goto fail;
        PyTuple_SET_ITEM(out, i, made);
        if (address(made, &base[n])) goto fail;
    }
    if (self->workspace) {
        PyObject *spec[3] = {self->workspace_size, self->workspace_stride, self->byte};
        workspace = PyObject_Vectorcall(empty, spec, 3, NULL);
        if (!workspace || address(workspace, &base[-1])) goto fail;
    }
    if (self->products) {
        PyObject *number = PyObject_CallNoArgs(blas_handle);
        if (!number) goto fail;
        handle = PyLong_AsVoidPtr(number);
        Py_DECREF(number);
        if (PyErr_Occurred()) goto fail;
    }
    int error = 0, at = 0;
    {
        char room[self->blob_size + 128], *blob = (char *)(((uintptr_t)room + 127) & ~(uintptr_t)127);
        memcpy(blob, self->blob, self->blob_size);
        for (int i = 0; i < self->patches; i++) {
            const Patch *p = &self->patch[i];
            if (p->kind == SCALAR) { memcpy(blob + p->at, &values[p->slot], 4); continue; }
            char *pointer = base[p->slot] ? base[p->slot] + p->offset : NULL;
            if (p->kind == POINTER) memcpy(blob + p->at, &pointer, 8);
            else if ((error = replace_address(blob + p->at, pointer))) {
                PyErr_Format(PyExc_RuntimeError, "fdora: a tensor map did not take its address, error %d of CUDA", error);
                goto fail;
            }
        }
        for (int entered = 0;; entered = 1) {
            Py_BEGIN_ALLOW_THREADS
            for (error = at = 0; !error && at < self->steps; at++) {
                const Step *s = &self->step[at];
                error = s->is_product ? product(&s->product, base, values, handle) : launch(&s->launch, self, blob, stream);
            }
            Py_END_ALLOW_THREADS
            if (error != NO_CONTEXT || at != 1 || entered) break; /* nothing has run yet: once more, in the GPU's context */
            PyObject *done = PyObject_CallNoArgs(enter_context);
            if (!done) goto fail;
            Py_DECREF(done);
        }
    }
    if (error) { PyErr_Format(PyExc_RuntimeError, "fdora: step %d of a plan did not start, error %d of CUDA or cuBLAS", at - 1, error); goto fail; }
    Py_XDECREF(workspace);
    return out;
fail:
    Py_XDECREF(workspace);
    Py_DECREF(out);
    return NULL;
}

static PyMethodDef program_methods[] = {
    {"run", (PyCFunction)(void (*)(void))program_run, METH_FASTCALL, "run(tensors, scalars, stream) -> results"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject ProgramType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fdora_walk.Program",
    .tp_basicsize = sizeof(Program),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = program_new,
    .tp_dealloc = (destructor)program_dealloc,
    .tp_methods = program_methods,
};

/* setup(exchange capsule, tensor type, parameter type, empty, blas_handle, enter_context, cuLaunchKernelEx, cuTensorMapReplaceAddress, cublasGemmEx) */
static PyObject *setup(PyObject *self, PyObject *args) {
    PyObject *capsule;
    unsigned long long launch_at, replace_at, gemm_at;
    if (!PyArg_ParseTuple(args, "OOOOOOKKK", &capsule, &tensor_type, &parameter_type, &empty, &blas_handle, &enter_context, &launch_at,
                          &replace_at, &gemm_at))
        return NULL;
    exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!exchange) return NULL;
    if (exchange->version.major != 1) { PyErr_SetString(PyExc_RuntimeError, "DLPack's version is not 1"); return NULL; }
    Py_INCREF(tensor_type); Py_INCREF(parameter_type); Py_INCREF(empty); Py_INCREF(blas_handle); Py_INCREF(enter_context);
    launch_kernel = (LaunchKernel)(uintptr_t)launch_at;
    replace_address = (ReplaceAddress)(uintptr_t)replace_at;
    gemm_ex = (Gemm)(uintptr_t)gemm_at;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, "where torch, the driver and cuBLAS are"},
    {"facts", facts, METH_O, "a key of a tuple of tensors and None"},
    {"places", places, METH_O, "what a tuple of weak references refers to, how and where it lies, and its versions"},
    {"follow", (PyCFunction)(void (*)(void))follow, METH_FASTCALL, "what layers are called with (plain.c)"},
    {"unchanged", (PyCFunction)(void (*)(void))unchanged, METH_FASTCALL, "whether tensors are those of before (plain.c)"},
    {"operands", (PyCFunction)(void (*)(void))operands, METH_FASTCALL, "these, with the norms of a model (plain.c)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fdora_walk", NULL, -1, methods};

PyMODINIT_FUNC PyInit_fdora_walk(void) {
    if (PyType_Ready(&ProgramType)) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    if (PyModule_AddIntMacro(module, MAX_TENSORS) || PyModule_AddIntMacro(module, MAX_SCALARS)) return NULL;
    Py_INCREF(&ProgramType);
    if (PyModule_AddObject(module, "Program", (PyObject *)&ProgramType)) { Py_DECREF(module); return NULL; }
    return module;
}
