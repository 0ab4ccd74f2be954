// Browsers refuse workers to pages that are opened from a folder. There, search runs in a frame.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    #waiting = []; // messages sent before the script is loaded

    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.give = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.onload = () => {
        for (const data of this.#waiting) this.give(data);
        this.#waiting = null;
      };
      script.src = new URL(url, location.href);
      inside.document.head.append(script);
    }

    postMessage(data) {
      if (this.#waiting) this.#waiting.push(data);
      else this.give(data);
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker; // the theme looks for both names
}
