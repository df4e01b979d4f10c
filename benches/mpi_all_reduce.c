/* MPI_Allreduce of float32, sum, in place. Prints a JSON object for each size, as pytorch_all_reduce.py does.

   mpirun -n RANKS mpi_all_reduce BYTES... */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { WARM_UP = 3, ROUNDS = 5 };

static void all_reduce(float *data, int count) {
    MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

/* Returns the seconds that one call takes on the slowest rank. */
static double seconds(float *data, int count, int iters) {
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    for (int i = 0; i < iters; i++) all_reduce(data, count);
    double slowest = (MPI_Wtime() - began) / iters;
    MPI_Allreduce(MPI_IN_PLACE, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest;
}

/* Stops all ranks unless the sum of ones is the number of ranks. Leaves zeros, whose sums stay finite. */
static void check_sum(float *data, int count, int world_size) {
    for (int i = 0; i < count; i++) data[i] = 1;
    all_reduce(data, count);
    for (int i = 0; i < count; i++) {
        if (data[i] != world_size) MPI_Abort(MPI_COMM_WORLD, 1);
        data[i] = 0;
    }
}

static int ascending(const void *a, const void *b) {
    double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

int main(int argc, char **argv) {
    int rank, world_size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    for (int arg = 1; arg < argc; arg++) {
        int bytes = atoi(argv[arg]), count = bytes / (int)sizeof(float);
        float *data = malloc(bytes);
        if (!data) MPI_Abort(MPI_COMM_WORLD, 1);
        check_sum(data, count, world_size);
        double warm_up = seconds(data, count, WARM_UP), times[ROUNDS];
        /* As long as ddp-mp's bench: a quarter of a second, in five rounds. */
        int iters = warm_up < 0.05 ? (int)(0.05 / warm_up) : 1;
        for (int i = 0; i < ROUNDS; i++) times[i] = seconds(data, count, iters);
        qsort(times, ROUNDS, sizeof *times, ascending);
        if (rank == 0) printf("{\"bytes\": %d, \"time_us\": %g}\n", bytes, times[ROUNDS / 2] * 1e6);
        free(data);
    }
    MPI_Finalize();
}
