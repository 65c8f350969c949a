/* follow(layers, names, alone), unchanged(tensors, references, versions, i) and operands(x, found, norms, references, s, versions, c);
   see fdora/_plain.py, whose twins these are. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum { MODULES, PARAMETERS, ROUTE, VERSION, SHARED, KEPT, NORMS, PLACE, NAMES };
static PyObject *names[NAMES]; /* interned at the first call */

static int intern(void) {
    static const char *const text[] = {"_modules", "_parameters", "route", "_version", "shared", "kept", "norms", "place"};
    for (int i = 0; i < NAMES; i++)
        if (!names[i] && !(names[i] = PyUnicode_InternFromString(text[i]))) return 0;
    return 1;
}

static PyObject *entry_of(PyObject *dict, PyObject *key) { /* borrowed; NULL where there is none */
    return dict && PyDict_Check(dict) ? PyDict_GetItemWithError(dict, key) : NULL;
}

/* Whether the module at the end of the path is as the entry (path, class, parameters, attributes) has it. Its parameters go into
   ``out`` from *n on. Without ``quiet`` no attribute must be false. */
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
    for (Py_ssize_t i = 0; plain && quiet && i < PyTuple_GET_SIZE(quiet); i++) {
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

/* (variant, s, its parameters) of one layer, a new reference; NULL where it is another than its route says. ``framework``: the names
   of its attributes (variants, active adapter, and those that must be quiet). */
static PyObject *follow_one(PyObject *layer, PyObject *framework, int alone) {
    PyObject *variants = PyTuple_GET_ITEM(framework, 0), *named = PyTuple_GET_ITEM(framework, 1), *quiet = PyTuple_GET_ITEM(framework, 2);
    PyObject *dict = PyObject_GenericGetDict(layer, NULL), *found = NULL;
    if (!dict) return NULL;
    PyObject *active = PyDict_GetItemWithError(dict, named);
    if (active && PyList_CheckExact(active) && PyList_GET_SIZE(active) == 1) active = PyList_GET_ITEM(active, 0);
    PyObject *variant = active && PyUnicode_CheckExact(active) ? entry_of(PyDict_GetItemWithError(dict, variants), active) : NULL;
    PyObject *inside = variant ? PyObject_GenericGetDict(variant, NULL) : NULL;
    PyObject *route = inside ? PyDict_GetItemWithError(inside, names[ROUTE]) : NULL, *shared;
    if (route && alone && (shared = PyDict_GetItemWithError(inside, names[SHARED])) && shared != Py_None) route = NULL;
    if (route && PyTuple_Check(route)) { /* (name, s, entries, how many parameters, ...) */
        PyObject *entries = PyTuple_GET_ITEM(route, 2);
        Py_ssize_t n = 2, size = 2 + PyLong_AsSsize_t(PyTuple_GET_ITEM(route, 3));
        int plain = PyObject_RichCompareBool(active, PyTuple_GET_ITEM(route, 0), Py_EQ) == 1;
        Py_INCREF(route);
        found = plain && size >= 2 ? PyTuple_New(size) : NULL;
        if (found) {
            PyTuple_SET_ITEM(found, 0, Py_NewRef(variant));
            PyTuple_SET_ITEM(found, 1, Py_NewRef(PyTuple_GET_ITEM(route, 1)));
            for (Py_ssize_t i = 0; plain && i < PyTuple_GET_SIZE(entries); i++)
                plain = read_entry(layer, PyTuple_GET_ITEM(entries, i), alone && !i ? NULL : quiet, found, &n);
            if (!plain || n != size) Py_CLEAR(found);
        }
        Py_DECREF(route);
    }
    Py_XDECREF(inside);
    Py_DECREF(dict);
    return found;
}

static PyObject *follow(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyTuple_CheckExact(args[0]) || !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) != 3
        || !PyTuple_Check(PyTuple_GET_ITEM(args[1], 2)) || !PyBool_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "follow wants a tuple of layers, the names of their attributes, and a bool");
        return NULL;
    }
    if (!intern()) return NULL;
    PyObject *out = PyList_New(PyTuple_GET_SIZE(args[0]));
    for (Py_ssize_t i = 0; out && i < PyTuple_GET_SIZE(args[0]); i++) {
        PyObject *found = follow_one(PyTuple_GET_ITEM(args[0], i), args[1], args[2] == Py_True);
        if (found) PyList_SET_ITEM(out, i, found);
        else Py_CLEAR(out);
    }
    if (out) return out;
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* Whether this is the tensor that is referred to, and has this version; -1 for an error. */
static int is_same(PyObject *tensor, PyObject *reference, PyObject *before) {
    PyObject *known = PyObject_CallNoArgs(reference);
    if (!known) return -1;
    Py_DECREF(known);
    if (known != tensor || known == Py_None) return 0;
    PyObject *version = PyObject_GetAttr(tensor, names[VERSION]);
    int same = version ? PyObject_RichCompareBool(version, before, Py_EQ) : -1;
    Py_XDECREF(version);
    return same;
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
        int same = is_same(PyTuple_GET_ITEM(args[0], k), PyTuple_GET_ITEM(args[1], i), PyTuple_GET_ITEM(args[2], i));
        if (same < 0) return NULL;
        if (!same) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* The place of a layer with this variant among those of ``norms``; -1 where it has none. */
static Py_ssize_t place_of(PyObject *variant, PyObject *norms) {
    Py_ssize_t place = -1;
    PyObject *dict = PyObject_GenericGetDict(variant, NULL), *kept = dict ? PyDict_GetItemWithError(dict, names[KEPT]) : NULL;
    PyObject *inside = kept ? PyObject_GenericGetDict(kept, NULL) : NULL;
    if (inside && PyDict_GetItemWithError(inside, names[NORMS]) == norms) {
        PyObject *number = PyDict_GetItemWithError(inside, names[PLACE]);
        if (number && PyLong_CheckExact(number)) place = PyLong_AsSsize_t(number);
    }
    Py_XDECREF(inside);
    Py_XDECREF(dict);
    return place;
}

enum { LAYER = 7 }; /* W, A, B, m, c, bias, seed */

static PyObject *operands(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    int plain = count == 7 && PyList_CheckExact(args[1]) && PyTuple_CheckExact(args[3]) && PyList_CheckExact(args[4])
                && PyTuple_CheckExact(args[5]) && PyList_CheckExact(args[6]);
    Py_ssize_t n = plain ? PyList_GET_SIZE(args[4]) : 0;
    if (!plain || PyTuple_GET_SIZE(args[3]) != 3 * n || PyTuple_GET_SIZE(args[5]) != 3 * n || PyList_GET_SIZE(args[6]) != n) {
        PyErr_SetString(PyExc_TypeError, "operands wants x, a list of what was found, and what is known of the layers of a model");
        return NULL;
    }
    if (!intern()) return NULL;
    PyObject *out = PyTuple_New(1 + LAYER * PyList_GET_SIZE(args[1]));
    if (out) PyTuple_SET_ITEM(out, 0, Py_NewRef(args[0]));
    for (Py_ssize_t k = 0; out && k < PyList_GET_SIZE(args[1]); k++) {
        PyObject *layer = PyList_GET_ITEM(args[1], k), **to = &PyTuple_GET_ITEM(out, 1 + LAYER * k);
        int same = PyTuple_CheckExact(layer) && PyTuple_GET_SIZE(layer) == 7; /* variant, s, W, A, B, m, bias */
        Py_ssize_t i = same ? place_of(PyTuple_GET_ITEM(layer, 0), args[2]) : -1;
        same = i >= 0 && i < n && PyObject_RichCompareBool(PyTuple_GET_ITEM(layer, 1), PyList_GET_ITEM(args[4], i), Py_EQ) == 1;
        for (Py_ssize_t j = 0; same == 1 && j < 3; j++)
            same = is_same(PyTuple_GET_ITEM(layer, 2 + j), PyTuple_GET_ITEM(args[3], i + j * n), PyTuple_GET_ITEM(args[5], i + j * n));
        if (same != 1) { Py_CLEAR(out); break; }
        for (int j = 0; j < 4; j++) to[j] = Py_NewRef(PyTuple_GET_ITEM(layer, 2 + j));
        to[4] = Py_NewRef(PyList_GET_ITEM(args[6], i));
        to[5] = Py_NewRef(PyTuple_GET_ITEM(layer, 6));
        to[6] = Py_NewRef(Py_None);
    }
    if (out || PyErr_Occurred()) return out;
    Py_RETURN_NONE;
}
