// Driver: reads the arrays of a problem and some plans, runs them as often as told, and says how long it took.
//
//     simulator ARRAYS RESULTS, then on standard input the number of passes over all plans, line by line; every answer is the
//     seconds that they took. RESULTS receives what the last pass found.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>

#include "simulator.hpp"

using Arrays = std::map<std::string, std::vector<char>>;

// The file: for every array its name (16 bytes), its size in bytes (8) and its bytes.
Arrays read_arrays(const char* path) {
    std::ifstream file(path, std::ios::binary);
    Arrays arrays;
    char name[17] = {};
    uint64_t size;
    while (file.read(name, 16) && file.read(reinterpret_cast<char*>(&size), 8)) {
        arrays[name].resize(size);
        file.read(arrays[name].data(), size);
    }
    return arrays;
}

template <class T>
void take(const Arrays& arrays, const char* name, std::vector<T>& out) {
    const std::vector<char>& bytes = arrays.at(name);
    if (bytes.size() % sizeof(T)) throw std::runtime_error(std::string(name) + ": records of another size");
    out.resize(bytes.size() / sizeof(T));
    if (!bytes.empty()) std::memcpy(static_cast<void*>(out.data()), bytes.data(), bytes.size());
}

int main(int count, char** arguments) {
    if (count != 3) return std::fprintf(stderr, "usage: simulator ARRAYS RESULTS\n"), 2;
    Arrays arrays = read_arrays(arguments[1]);
    Simulator s;
    std::vector<uint32_t> sizes, plans;
    take(arrays, "sizes", sizes), take(arrays, "plans", plans);
    s.num_devices = sizes.at(0), s.num_columns = sizes.at(1), s.num_channels = sizes.at(2), s.width = sizes.at(3);
    take(arrays, "time_s", s.time_s), take(arrays, "table_s", s.table_s), take(arrays, "task", s.tasks);
    take(arrays, "value", s.values), take(arrays, "readers", s.readers), take(arrays, "pair", s.pairs);
    take(arrays, "missing", s.missing), take(arrays, "first", s.first), take(arrays, "inputs", s.inputs);
    take(arrays, "outputs", s.outputs), take(arrays, "owner", s.owner), take(arrays, "column", s.column);
    take(arrays, "channels", s.channels), take(arrays, "rank_of_task", s.rank_of_task);
    take(arrays, "task_of_rank", s.task_of_rank), take(arrays, "resident_bytes", s.resident_bytes);
    take(arrays, "reserved_bytes", s.reserved_bytes);
    s.allocate();
    const size_t groups = s.resident_bytes.size(), rows = groups ? plans.size() / groups : 0;
    std::vector<double> steps(rows), busy(rows * s.num_devices);
    std::vector<int64_t> outcomes(rows), peaks(rows * s.num_devices);
    for (long passes; std::cin >> passes;) {
        auto begin = std::chrono::steady_clock::now();
        for (long pass = 0; pass < passes; pass++)
            for (size_t row = 0; row < rows; row++) {
                outcomes[row] = s.run(&plans[row * groups]);
                steps[row] = s.step_s;
                for (uint32_t device = 0; device < s.num_devices; device++) {
                    peaks[row * s.num_devices + device] = s.devices[device].peak;
                    busy[row * s.num_devices + device] = s.devices[device].busy_s;
                }
            }
        std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        std::printf("%.9g\n", took.count());
        std::fflush(stdout);
    }
    std::ofstream results(arguments[2], std::ios::binary);
    results.write(reinterpret_cast<const char*>(outcomes.data()), outcomes.size() * 8);
    results.write(reinterpret_cast<const char*>(steps.data()), steps.size() * 8);
    results.write(reinterpret_cast<const char*>(peaks.data()), peaks.size() * 8);
    results.write(reinterpret_cast<const char*>(busy.data()), busy.size() * 8);
    return 0;
}
