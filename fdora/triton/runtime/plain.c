/* parameters(module, spec, quiet) -> the parameters of plain modules below a module; see fdora/_plain.py, whose twin this is. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum { MAX_PARAMETERS = 32 };
static PyObject *modules_name, *parameters_name; /* interned at the first call */

/* One entry (path, class, names) of a spec: new references to its parameters, behind the *n that are there. 0 where it is another. */
static int read_entry(PyObject *module, PyObject *entry, PyObject *quiet, PyObject **found, int *n) {
    PyObject *path = PyTuple_GET_ITEM(entry, 0), *names = PyTuple_GET_ITEM(entry, 2), *dict, *inside;
    Py_INCREF(module);
    for (Py_ssize_t i = 0; i <= PyTuple_GET_SIZE(path); i++) {
        dict = PyObject_GenericGetDict(module, NULL);
        if (!dict) { Py_DECREF(module); return 0; }
        if (i == PyTuple_GET_SIZE(path)) break;
        inside = PyDict_GetItemWithError(dict, modules_name);
        PyObject *next = inside && PyDict_Check(inside) ? PyDict_GetItemWithError(inside, PyTuple_GET_ITEM(path, i)) : NULL;
        Py_XINCREF(next);
        Py_DECREF(dict);
        Py_DECREF(module);
        if (!next) return 0;
        module = next;
    }
    int plain = (PyObject *)Py_TYPE(module) == PyTuple_GET_ITEM(entry, 1);
    for (Py_ssize_t i = 0; plain && i < PyTuple_GET_SIZE(quiet); i++) {
        PyObject *value = PyDict_GetItemWithError(dict, PyTuple_GET_ITEM(quiet, i));
        plain = !PyErr_Occurred() && (!value || PyObject_IsTrue(value) == 0);
    }
    inside = plain ? PyDict_GetItemWithError(dict, parameters_name) : NULL;
    plain = inside && PyDict_Check(inside);
    for (Py_ssize_t i = 0; plain && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *value = *n < MAX_PARAMETERS ? PyDict_GetItemWithError(inside, PyTuple_GET_ITEM(names, i)) : NULL;
        if ((plain = value != NULL)) { Py_INCREF(value); found[(*n)++] = value; }
    }
    Py_DECREF(dict);
    Py_DECREF(module);
    return plain;
}

static PyObject *parameters(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyTuple_CheckExact(args[1]) || !PyTuple_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "parameters wants a module, a tuple of (path, class, names) and a tuple of attributes");
        return NULL;
    }
    if (!modules_name) modules_name = PyUnicode_InternFromString("_modules");
    if (!parameters_name) parameters_name = PyUnicode_InternFromString("_parameters");
    if (!modules_name || !parameters_name) return NULL;
    PyObject *found[MAX_PARAMETERS], *out = NULL;
    int n = 0, plain = 1;
    for (Py_ssize_t i = 0; plain && i < PyTuple_GET_SIZE(args[1]); i++)
        plain = read_entry(args[0], PyTuple_GET_ITEM(args[1], i), args[2], found, &n);
    if (plain) {
        out = PyTuple_New(n);
        for (int i = 0; out && i < n; i++) PyTuple_SET_ITEM(out, i, Py_NewRef(found[i]));
    }
    for (int i = 0; i < n; i++) Py_DECREF(found[i]);
    if (out || (plain && PyErr_Occurred())) return out;
    PyErr_Clear();
    Py_RETURN_NONE;
}
