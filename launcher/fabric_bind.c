// Sockets that would listen on every address of the machine listen on the fabric address instead.
//
// Ray and PyTorch's rendezvous have no setting for the address on which they listen. Preloaded into them, this library
// changes what bind() is asked for: the wildcard address becomes EXL3_BIND_ADDRESS (IPv4), as which it is also known to
// IPv6 sockets (::ffff:a.b.c.d). The port EXL3_BIND_EXCEPT, the API's, is left alone. No other address is touched.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

typedef int (*bind_function)(int, const struct sockaddr *, socklen_t);

static int is_excepted(in_port_t port) {
  const char *except = getenv("EXL3_BIND_EXCEPT");
  return except && ntohs(port) == atoi(except);
}

int bind(int fd, const struct sockaddr *address, socklen_t length) {
  bind_function real = (bind_function)dlsym(RTLD_NEXT, "bind");
  const char *text = getenv("EXL3_BIND_ADDRESS");
  struct in_addr fabric;
  if (!text || !address || inet_pton(AF_INET, text, &fabric) != 1) return real(fd, address, length);

  if (address->sa_family == AF_INET && length >= sizeof(struct sockaddr_in)) {
    struct sockaddr_in four;
    memcpy(&four, address, sizeof four);
    if (four.sin_addr.s_addr == htonl(INADDR_ANY) && !is_excepted(four.sin_port)) {
      four.sin_addr = fabric;
      return real(fd, (struct sockaddr *)&four, sizeof four);
    }
  }
  if (address->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6)) {
    struct sockaddr_in6 six;
    memcpy(&six, address, sizeof six);
    if (IN6_IS_ADDR_UNSPECIFIED(&six.sin6_addr) && !is_excepted(six.sin6_port)) {
      int only_six = 0;
      socklen_t size = sizeof only_six;
      // A socket for IPv6 alone cannot have an IPv4 address; nothing of ours opens one, so it is refused, not let through.
      if (getsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only_six, &size) == 0 && only_six) {
        errno = EADDRNOTAVAIL;
        return -1;
      }
      memset(&six.sin6_addr, 0, sizeof six.sin6_addr);
      memset(six.sin6_addr.s6_addr + 10, 0xff, 2);
      memcpy(six.sin6_addr.s6_addr + 12, &fabric, sizeof fabric);
      return real(fd, (struct sockaddr *)&six, sizeof six);
    }
  }
  return real(fd, address, length);
}
