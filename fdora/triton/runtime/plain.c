/* follow(layers, own, quiet) and unchanged(tensors, references, versions, i); see fdora/_plain.py, whose twins these are. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyObject *names[6]; /* interned at the first call */
enum { MODULES, PARAMETERS, VARIANTS, ACTIVE, ROUTE, VERSION };

static int intern(void) {
    static const char *const text[] = {"_modules", "_parameters", "lora_variant", "_active_adapter", "route", "_version"};
    for (int i = 0; i < 6; i++)
        if (!names[i] && !(names[i] = PyUnicode_InternFromString(text[i]))) return 0;
    return 1;
}

static PyObject *entry_of(PyObject *dict, PyObject *key) { /* borrowed; NULL where there is none */
    return dict && PyDict_Check(dict) ? PyDict_GetItemWithError(dict, key) : NULL;
}

/* Whether the module at the end of the path is as the entry (path, class, parameters, attributes) has it. Its parameters go into
   ``out`` from *n on. */
static int read_entry(PyObject *module, PyObject *entry, PyObject *quiet, PyObject *out, Py_ssize_t *n) {
    PyObject *path = PyTuple_GET_ITEM(entry, 0), *wanted = PyTuple_GET_ITEM(entry, 2), *same = PyTuple_GET_ITEM(entry, 3), *dict;
    Py_INCREF(module);
    for (Py_ssize_t i = 0;; i++) {
        dict = PyObject_GenericGetDict(module, NULL);
        if (!dict) { Py_DECREF(module); return 0; }
        if (i == PyTuple_GET_SIZE(path)) break;
        PyObject *next = entry_of(entry_of(dict, names[MODULES]), PyTuple_GET_ITEM(path, i));
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
    for (Py_ssize_t i = 0; plain && i < PyTuple_GET_SIZE(same); i++) {
        PyObject *pair = PyTuple_GET_ITEM(same, i), *value = PyDict_GetItemWithError(dict, PyTuple_GET_ITEM(pair, 0));
        Py_XINCREF(value);
        plain = value && PyObject_RichCompareBool(value, PyTuple_GET_ITEM(pair, 1), Py_EQ) == 1;
        Py_XDECREF(value);
    }
    PyObject *parameters = plain ? entry_of(dict, names[PARAMETERS]) : NULL;
    for (Py_ssize_t i = 0; plain && i < PyTuple_GET_SIZE(wanted); i++) {
        PyObject *value = *n < PyTuple_GET_SIZE(out) ? entry_of(parameters, PyTuple_GET_ITEM(wanted, i)) : NULL;
        if ((plain = value != NULL)) PyTuple_SET_ITEM(out, (*n)++, Py_NewRef(value));
    }
    Py_DECREF(dict);
    Py_DECREF(module);
    return plain;
}

/* (variant, s, its parameters) of one layer, a new reference; NULL where it is another than its route says. */
static PyObject *follow_one(PyObject *layer, PyObject *own, PyObject *quiet) {
    PyObject *dict = PyObject_GenericGetDict(layer, NULL), *found = NULL;
    if (!dict) return NULL;
    PyObject *active = PyDict_GetItemWithError(dict, names[ACTIVE]);
    if (active && PyList_CheckExact(active) && PyList_GET_SIZE(active) == 1) active = PyList_GET_ITEM(active, 0);
    PyObject *variant = active && PyUnicode_CheckExact(active) ? entry_of(PyDict_GetItemWithError(dict, names[VARIANTS]), active) : NULL;
    PyObject *inside = variant ? PyObject_GenericGetDict(variant, NULL) : NULL;
    PyObject *route = inside ? PyDict_GetItemWithError(inside, names[ROUTE]) : NULL;
    if (route && PyTuple_Check(route)) { /* (name, s, entries, how many parameters) */
        PyObject *entries = PyTuple_GET_ITEM(route, 2);
        Py_ssize_t n = 2, size = 2 + PyLong_AsSsize_t(PyTuple_GET_ITEM(route, 3));
        int plain = PyObject_RichCompareBool(active, PyTuple_GET_ITEM(route, 0), Py_EQ) == 1;
        Py_INCREF(route);
        found = plain && size >= 2 ? PyTuple_New(size) : NULL;
        if (found) {
            PyTuple_SET_ITEM(found, 0, Py_NewRef(variant));
            PyTuple_SET_ITEM(found, 1, Py_NewRef(PyTuple_GET_ITEM(route, 1)));
            for (Py_ssize_t i = 0; plain && i < PyTuple_GET_SIZE(entries); i++)
                plain = read_entry(layer, PyTuple_GET_ITEM(entries, i), i ? quiet : own, found, &n);
            if (!plain || n != size) Py_CLEAR(found);
        }
        Py_DECREF(route);
    }
    Py_XDECREF(inside);
    Py_DECREF(dict);
    return found;
}

static PyObject *follow(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyTuple_CheckExact(args[0]) || !PyTuple_CheckExact(args[1]) || !PyTuple_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "follow wants a tuple of layers and two tuples of attributes");
        return NULL;
    }
    if (!intern()) return NULL;
    PyObject *out = PyList_New(PyTuple_GET_SIZE(args[0]));
    for (Py_ssize_t i = 0; out && i < PyTuple_GET_SIZE(args[0]); i++) {
        PyObject *found = follow_one(PyTuple_GET_ITEM(args[0], i), args[1], args[2]);
        if (found) PyList_SET_ITEM(out, i, found);
        else Py_CLEAR(out);
    }
    if (out) return out;
    PyErr_Clear();
    Py_RETURN_NONE;
}

static PyObject *unchanged(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t i = count == 4 ? PyLong_AsSsize_t(args[3]) : -1, few, many;
    if (count != 4 || !PyTuple_CheckExact(args[0]) || !PyTuple_CheckExact(args[1]) || !PyTuple_CheckExact(args[2])
        || !(few = PyTuple_GET_SIZE(args[0])) || (many = PyTuple_GET_SIZE(args[1])) != PyTuple_GET_SIZE(args[2]) || i < 0 || i >= many / few) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "unchanged wants tensors, references and their versions in tuples, and a place");
        return NULL;
    }
    if (!intern()) return NULL;
    for (Py_ssize_t k = 0; k < few; k++, i += many / few) {
        PyObject *tensor = PyTuple_GET_ITEM(args[0], k), *known = PyObject_CallNoArgs(PyTuple_GET_ITEM(args[1], i));
        if (!known) return NULL;
        Py_DECREF(known);
        if (known != tensor) Py_RETURN_FALSE;
        PyObject *version = PyObject_GetAttr(tensor, names[VERSION]);
        int same = version ? PyObject_RichCompareBool(version, PyTuple_GET_ITEM(args[2], i), Py_EQ) : -1;
        Py_XDECREF(version);
        if (same < 0) return NULL;
        if (!same) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}
