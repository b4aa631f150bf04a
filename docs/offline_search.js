// Search of pages that are opened from a disk: browsers start no worker there, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      inside.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => this.load(one)), Promise.resolve());
      inside.__search = window.__search; // where the index of all pages is
      this.load(new URL(url, location.href).href).then(() => {
        const { waiting } = this;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
    }

    load(url) {
      return new Promise((done, failed) => {
        const script = this.frame.contentDocument.createElement("script");
        Object.assign(script, { src: url, onload: done, onerror: failed });
        this.frame.contentDocument.body.append(script);
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
